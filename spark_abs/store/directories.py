"""Google's store by pyarrow, with directories as it has them for S3: each file implies those above it."""

from __future__ import annotations

from pyarrow import NativeFile, fs


def with_directories(store: fs.FileSystem) -> fs.FileSystem:
    """Return a store in which a directory is what lies below it.

    pyarrow lists a directory, and removes one, only if an object stands for it, which few libraries make.
    """
    return fs.PyFileSystem(_Directories(store))


class _Directories(fs.FileSystemHandler):  # type: ignore[misc]
    """All but listings and removals is the store's own."""

    def __init__(self, store: fs.FileSystem) -> None:
        self._store = store

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Directories) and bool(self._store == other._store)

    def __hash__(self) -> int:
        return hash(id(self._store))

    def get_type_name(self) -> str:
        return str(self._store.type_name)

    def normalize_path(self, path: str) -> str:
        return str(self._store.normalize_path(path))

    def get_file_info(self, paths: list[str]) -> list[fs.FileInfo]:
        return list(self._store.get_file_info(paths))

    def get_file_info_selector(self, selector: fs.FileSelector) -> list[fs.FileInfo]:
        """List a directory; also one level of it asks for all that is below."""
        everything = fs.FileSelector(
            selector.base_dir, allow_not_found=selector.allow_not_found, recursive=True
        )
        top = selector.base_dir.rstrip("/")
        found: dict[str, fs.FileInfo] = {}
        for info in self._store.get_file_info(everything):
            parts = info.path.removeprefix(f"{top}/").split("/")
            for depth in range(1, len(parts)):
                directory = "/".join((top, *parts[:depth]))
                found.setdefault(directory, fs.FileInfo(directory, fs.FileType.Directory))
            found[info.path] = info
        if not selector.recursive:
            return [info for path, info in found.items() if "/" not in path.removeprefix(f"{top}/")]
        return list(found.values())

    def create_dir(self, path: str, recursive: bool) -> None:
        self._store.create_dir(path, recursive=recursive)

    def delete_dir(self, path: str) -> None:
        self._store.delete_dir_contents(path, missing_dir_ok=True)
        if self._store.get_file_info(path).type is fs.FileType.Directory:
            self._store.delete_dir(path)

    def delete_dir_contents(self, path: str, missing_dir_ok: bool = False) -> None:
        self._store.delete_dir_contents(path, missing_dir_ok=missing_dir_ok)

    def delete_root_dir_contents(self) -> None:
        raise NotImplementedError("nobody removes all buckets")

    def delete_file(self, path: str) -> None:
        self._store.delete_file(path)

    def move(self, src: str, dest: str) -> None:
        self._store.move(src, dest)

    def copy_file(self, src: str, dest: str) -> None:
        self._store.copy_file(src, dest)

    def open_input_stream(self, path: str) -> NativeFile:
        return self._store.open_input_stream(path, compression=None)

    def open_input_file(self, path: str) -> NativeFile:
        return self._store.open_input_file(path)

    def open_output_stream(self, path: str, metadata: dict[str, str]) -> NativeFile:
        return self._store.open_output_stream(path, compression=None, metadata=metadata or None)

    def open_append_stream(self, path: str, metadata: dict[str, str]) -> NativeFile:
        return self._store.open_append_stream(path, compression=None, metadata=metadata or None)
