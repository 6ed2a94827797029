"""A disk whose reads fail where a test says so: a file system of pyarrow's, so that Arrow sees it fail."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any

import pytest
from pyarrow import fs

from spark_abs.store.storage import Place

Fails = Callable[[str], bool]


class _Failing(fs.FileSystemHandler):  # type: ignore[misc]
    """The local file system, but for opening files that `fails` names."""

    def __init__(self, fails: Fails) -> None:
        self._disk = fs.LocalFileSystem()
        self._fails = fails

    def _require(self, path: str) -> None:
        if self._fails(path):
            raise OSError(errno.ESTALE, "Stale file handle", path)

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def get_type_name(self) -> str:
        return "failing"

    def normalize_path(self, path: str) -> Any:
        return self._disk.normalize_path(path)

    def get_file_info(self, paths: list[str]) -> Any:
        return self._disk.get_file_info(paths)

    def get_file_info_selector(self, selector: fs.FileSelector) -> Any:
        return self._disk.get_file_info(selector)

    def create_dir(self, path: str, recursive: bool) -> None:
        self._disk.create_dir(path, recursive=recursive)

    def delete_dir(self, path: str) -> None:
        self._disk.delete_dir(path)

    def delete_dir_contents(self, path: str, missing_dir_ok: bool = False) -> None:
        self._disk.delete_dir_contents(path, missing_dir_ok=missing_dir_ok)

    def delete_root_dir_contents(self) -> None:
        raise NotImplementedError

    def delete_file(self, path: str) -> None:
        self._disk.delete_file(path)

    def move(self, source: str, target: str) -> None:
        self._disk.move(source, target)

    def copy_file(self, source: str, target: str) -> None:
        self._disk.copy_file(source, target)

    def open_input_stream(self, path: str) -> Any:
        self._require(path)
        return self._disk.open_input_stream(path)

    def open_input_file(self, path: str) -> Any:
        self._require(path)
        return self._disk.open_input_file(path)

    def open_output_stream(self, path: str, metadata: Any) -> Any:
        return self._disk.open_output_stream(path, metadata=metadata)

    def open_append_stream(self, path: str, metadata: Any) -> Any:
        return self._disk.open_append_stream(path, metadata=metadata)


def fail_reads(monkeypatch: pytest.MonkeyPatch, fails: Fails) -> None:
    """Let every read of a path fail, in this process, for which `fails` says so."""
    failing = fs.PyFileSystem(_Failing(fails))
    monkeypatch.setattr(Place, "fs", property(lambda _: failing))
    monkeypatch.setattr(Place, "local", property(lambda _: True))
