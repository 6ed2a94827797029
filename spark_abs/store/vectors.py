"""Deletion vectors of a Delta table: files beside the data, which leave a table on their own."""

from __future__ import annotations

from deltalake import DeltaTable
from deltalake.exceptions import DeltaError


def lacks_vectors(then: DeltaTable) -> str:
    """Say which file of deletion vectors a version lacks, empty if it has all; reads all that it has.

    A data file stays in the table when more of its rows are deleted, and the older vector leaves it. Neither
    Delta's RESTORE nor the list of files of a version tells that it is gone.

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
