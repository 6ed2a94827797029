"""The files of a version of a Delta table: where they are, and deletion vectors beside the data."""

from __future__ import annotations

from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from spark_abs.store.storage import Place


def place_of(then: DeltaTable, table: Place, uri: str) -> Place:
    """Return the place of a file out of `file_uris`, which has the path of a local table with escapes."""
    above = then.table_uri.removeprefix("file://")
    if table.local and uri.startswith(above):
        return table.below(uri.removeprefix(above))
    return table.storage.place(uri)


def lacks_vectors(then: DeltaTable) -> str:
    """Return a missing file of a version's deletion vectors, empty if all exist. Reads all of them.

    When more rows of a data file are deleted, the file stays in the table and its older vector is removed.
    Neither Delta's RESTORE nor the list of files of a version shows that a vector is missing.

    Raises:
        OSError: the store cannot be read now.
    """
    if "deletionVectors" not in (then.protocol().reader_features or ()):
        return ""
    try:
        then.deletion_vectors()
    except DeltaError as error:
        if "not found" not in str(error).lower():
            raise OSError(f"deletion vectors of {then.table_uri} cannot be read: {error}") from error
        return str(error)
    return ""
