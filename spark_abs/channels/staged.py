"""Files that wait to be committed after the first commit of their batch: named, copied, found again."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from pyarrow import fs

from spark_abs.channels.files import Evaluation, Written, evaluation_of, read_written
from spark_abs.errors import DamageError
from spark_abs.model import AttemptId, BatchId, RunId, StageId, checked_relative
from spark_abs.protocol.evaluation import Staged
from spark_abs.store.root import Root
from spark_abs.store.storage import Place
from spark_abs.store.table import AddFile

STAGING = "staging"
"""Directory below the root for rows that a table cannot take as files."""

_THREADS = 8


@dataclass(frozen=True, slots=True)
class Files:
    """Files of a batch, and the table or root to which their paths are relative."""

    place: Place
    written: Written

    @property
    def uris(self) -> list[str]:
        return [f"{self.place}/{file.path}" for file in self.written.files]

    def name(self, output: str, table: str) -> Staged:
        """Return the reference to the files for a commit."""
        files = self.written.files
        directory = os.path.dirname(files[0].path) if files else ""
        return Staged(
            output,
            table,
            directory=directory,
            files=len(files),
            rows=self.written.rows,
            size=self.written.size,
        )


def staging_of(stage: StageId, output: str) -> str:
    """Return where the rows of an output are staged, relative to the root."""
    return f"{STAGING}/{stage}.{output}"


def copy_files(files: Files, place: Place, directory: str) -> Files:
    """Copy files into a directory of another table. A kill leaves copies that no commit names.

    Raises:
        DamageError: a copy is not as long as its original.
    """
    originals = files.written.files
    if not originals:
        return Files(place, Written())
    targets = [f"{directory}/{os.path.basename(file.path)}" for file in originals]
    if place.local:
        place.fs.create_dir(f"{place.path}/{directory}", recursive=True)

    def copy(file: AddFile, target: str) -> None:
        fs.copy_files(
            f"{files.place.path}/{file.path}",
            f"{place.path}/{target}",
            source_filesystem=files.place.fs,
            destination_filesystem=place.fs,
            use_threads=False,
        )
        copied = place.fs.get_file_info(f"{place.path}/{target}")
        if copied.size != file.size:
            raise DamageError(
                f"the copy {place}/{target} has {copied.size} bytes, its original {files.place}/{file.path} "
                f"has {file.size}"
            )

    if len(originals) == 1:
        copy(originals[0], targets[0])
    else:
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="spark-abs-copies") as pool:
            list(pool.map(copy, originals, targets))
    return Files(
        place,
        Written(
            tuple(replace(file, path=path) for file, path in zip(originals, targets, strict=True)),
            tuple(
                replace(file, path=path)
                for file, path in zip(files.written.entry_files, targets, strict=True)
            ),
            files.written.schema,
        ),
    )


def find_staged(root: Root, staged: Staged, attempt: AttemptId, batch: BatchId) -> Files:
    """Return the files that a commit of a batch names, after reading each footer.

    Raises:
        DamageError: files are missing or altered; the message says what to do.
    """
    place = root.anywhere(staged.table) if staged.table else root.top
    if not staged.rows:
        return Files(place, Written())
    made_for = evaluation_of(os.path.basename(checked_relative(staged.directory)))
    if made_for is None or (made_for.attempt, made_for.batch) != (attempt, batch):
        raise DamageError(
            f"a commit of batch {batch} names the directory {staged.directory!r}, which was written for "
            "another batch"
        )
    found = read_written(place.fs, place.path, staged.directory)
    if (len(found.files), found.rows, found.size) != (staged.files, staged.rows, staged.size):
        raise DamageError(
            f"files of batch {batch} were deleted before all outputs had committed it: "
            f"{place}/{staged.directory} had {staged.files} files of output {staged.output!r} and has "
            f"{len(found.files)}. A VACUUM without retention or a lifecycle rule must spare the files of a "
            "stopped job. Put the files back, or go back with restart='checkpoint'"
        )
    return Files(place, found)


def sweep_staging(root: Root, stage: StageId, doomed: Callable[[Evaluation], bool]) -> dict[str, Evaluation]:
    """Delete a stage's staged files of finished evaluations; return the remaining files.

    The keys of the result are relative to the root.
    """
    left: dict[str, Evaluation] = {}
    for output in _names(root, STAGING):
        if not output.startswith(f"{stage}."):
            continue
        for name in _names(root, f"{STAGING}/{output}"):
            made_for, path = evaluation_of(name), f"{STAGING}/{output}/{name}"
            if made_for is not None and doomed(made_for):
                delete_staged(root, path)
            elif made_for is not None:
                left[path] = made_for
    return left


def delete_staged(root: Root, directory: str) -> None:
    """Delete a directory below the root, if it still exists."""
    try:
        root.fs.delete_dir(root.path(directory))
    except FileNotFoundError:
        return


def _names(root: Root, directory: str) -> Collection[str]:
    selector = fs.FileSelector(root.path(directory), allow_not_found=True)
    return [info.base_name for info in root.fs.get_file_info(selector)]


def over(attempt: AttemptId, run: RunId, newest: BatchId) -> Callable[[Evaluation], bool]:
    """Say what a new run may delete: all but files that the newest batch of its attempt may need."""

    def doomed(made_for: Evaluation) -> bool:
        return made_for.run <= run and (made_for.attempt, made_for.batch) != (attempt, newest)

    return doomed
