"""`checkpoints/` for readers: nothing is created, and one damaged row does not hide the others."""

from __future__ import annotations

from dataclasses import dataclass

from spark_abs.errors import DamageError
from spark_abs.manifests.checkpoints import PATH, SCHEMA, Checkpoints, Summary
from spark_abs.manifests.reading import read_rows, row_files
from spark_abs.model import CheckpointId, CheckpointKind
from spark_abs.store.root import Root
from spark_abs.store.table import Table

COLUMNS = [name for name in SCHEMA.names if name not in ("body", "v")]


@dataclass(frozen=True, slots=True)
class DamagedRow:
    """A manifest whose file cannot be read."""

    id: CheckpointId | None
    """As the Delta log has it; None if the log does not say."""
    path: str
    """Relative to the root."""
    error: str


@dataclass(frozen=True, slots=True)
class ManifestListing:
    """The completed checkpoints of a root, by id, and what is left of those that are damaged."""

    completed: tuple[Summary, ...] = ()
    damaged: tuple[DamagedRow, ...] = ()


def open_existing(root: Root, job: str) -> Checkpoints | None:
    """Open the manifests of a root; None if none was ever written. Creates nothing.

    Raises:
        DamageError: the table's log is damaged.
        OSError: the store cannot be read now.
    """
    try:
        return Checkpoints(root, job, Table.open(root.place(PATH)))
    except FileNotFoundError:
        return None


def list_manifests(root: Root, job: str) -> ManifestListing:
    """List what `checkpoints/` holds.

    All files are read at once; only if that fails are they read one by one.

    Raises:
        DamageError: the table's log is damaged.
        OSError: the store cannot be read now.
    """
    checkpoints = open_existing(root, job)
    if checkpoints is None:
        return ManifestListing()
    try:
        return ManifestListing(checkpoints.summaries())
    except DamageError:
        return _one_by_one(root)


def _one_by_one(root: Root) -> ManifestListing:
    table = Table.open(root.place(PATH))
    completed: list[Summary] = []
    damaged: list[DamagedRow] = []
    for file in row_files(table, PATH):
        try:
            rows = read_rows(root, file.path, COLUMNS)
        except DamageError as error:
            damaged.append(DamagedRow(file.least, file.path, str(error).removeprefix(f"{file.path}: ")))
        else:
            completed += [Summary(**{**row, "kind": CheckpointKind(row["kind"])}) for row in rows]
    return ManifestListing(
        tuple(sorted(completed, key=lambda s: s.id)),
        tuple(sorted(damaged, key=lambda d: (d.id or 0, d.path))),
    )
