"""Which Delta tables may be committed to without Spark."""

from __future__ import annotations

import json

from deltalake import DeltaTable

_INERT = frozenset(("appendOnly", "invariants", "timestampNtz"))
"""Features that ask nothing of an append, once no column has an invariant."""


def why_not_native(table: DeltaTable) -> str | None:
    """Return what keeps a table from being plain, None if it is.

    A plain table takes Parquet files as Spark writes them: no feature rewrites, checks or numbers the
    rows. Whatever is not known here is not plain: Delta's own writer then does the work.
    """
    protocol = table.protocol()
    features = frozenset(protocol.reader_features or ()) | frozenset(protocol.writer_features or ())
    if others := sorted(features - _INERT):
        return f"table features {', '.join(others)}"
    if not features and (protocol.min_reader_version > 1 or protocol.min_writer_version > 2):
        return f"protocol {protocol.min_reader_version}, {protocol.min_writer_version}"
    if table.metadata().partition_columns:
        return "partition columns"
    for field in json.loads(table.schema().to_json())["fields"]:
        if not field["nullable"]:
            return f"column {field['name']} is NOT NULL"
        if rules := sorted(key for key in field["metadata"] if key.startswith("delta.")):
            return f"column {field['name']} has {', '.join(rules)}"
    return None
