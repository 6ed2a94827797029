"""By what a query is known: its file `metadata`, which has its id."""

from __future__ import annotations

import hashlib

from spark_abs.manifest import StageSnapshot
from spark_abs.snapshots.materialise import METADATA


def identity(part: StageSnapshot) -> str:
    """Return the hash of the file with the query's id, empty if it is not kept."""
    return next((file.sha256 for file in part.files if file.path == METADATA), "")


def of_text(metadata: str) -> str:
    """Return the hash of the text of `metadata`, by which a query is known."""
    return hashlib.sha256(metadata.encode()).hexdigest()
