"""Google's and Azure's stores by pyarrow, with directories as it has them for S3: each file implies them."""

from __future__ import annotations

from pyarrow import NativeFile, fs


def in_google(store: fs.GcsFileSystem) -> fs.FileSystem:
    """Return a store in which a directory is what lies below it.

    pyarrow lists a directory, and removes one, only if an object stands for it, which few libraries make.
    """
    return fs.PyFileSystem(_Google(store))


def in_azure(store: fs.AzureFileSystem) -> fs.FileSystem:
    """Return a store in which the empty blobs that Hadoop makes for directories are none but directories.

    In an account without a hierarchical namespace pyarrow takes them for files beside the directories.
    """
    return fs.PyFileSystem(_Azure(store))


class _Wrapped(fs.FileSystemHandler):  # type: ignore[misc]
    """A store; all is its own."""

    def __init__(self, store: fs.FileSystem) -> None:
        self._store = store

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Wrapped) and bool(self._store == other._store)

    def __hash__(self) -> int:
        return hash(id(self._store))

    def get_type_name(self) -> str:
        return str(self._store.type_name)

    def normalize_path(self, path: str) -> str:
        return str(self._store.normalize_path(path))

    def get_file_info(self, paths: list[str]) -> list[fs.FileInfo]:
        return list(self._store.get_file_info(paths))

    def get_file_info_selector(self, selector: fs.FileSelector) -> list[fs.FileInfo]:
        return list(self._store.get_file_info(selector))

    def create_dir(self, path: str, recursive: bool) -> None:
        self._store.create_dir(path, recursive=recursive)

    def delete_dir(self, path: str) -> None:
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


class _Google(_Wrapped):
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

    def delete_dir(self, path: str) -> None:
        self._store.delete_dir_contents(path, missing_dir_ok=True)
        if self._store.get_file_info(path).type is fs.FileType.Directory:
            self._store.delete_dir(path)


class _Azure(_Wrapped):
    def get_file_info(self, paths: list[str]) -> list[fs.FileInfo]:
        return [self._seen(info) for info in self._store.get_file_info(paths)]

    def get_file_info_selector(self, selector: fs.FileSelector) -> list[fs.FileInfo]:
        found = self._store.get_file_info(selector)
        directories = {info.path for info in found if info.type is fs.FileType.Directory}
        files = (self._seen(info) for info in found if info.path not in directories)
        return [*(fs.FileInfo(path, fs.FileType.Directory) for path in sorted(directories)), *files]

    def delete_dir(self, path: str) -> None:
        """Remove a directory, and the blob that stands for it."""
        (info,) = self._store.get_file_info([path])
        is_blob = info.type is fs.FileType.File and self._seen(info).type is fs.FileType.Directory
        try:
            self._store.delete_dir(path)
        except FileNotFoundError:
            if not is_blob:
                raise
        if is_blob:
            self._store.delete_file(path)

    def _seen(self, info: fs.FileInfo) -> fs.FileInfo:
        """Return what a blob is: an empty one may stand for a directory, which only its metadata says."""
        if info.type is not fs.FileType.File or info.size:
            return info
        try:
            self._store.open_input_file(info.path).close()
        except FileNotFoundError:
            return fs.FileInfo(info.path, fs.FileType.NotFound)
        except OSError as error:
            if "Not a regular file" not in str(error):
                raise
            return fs.FileInfo(info.path, fs.FileType.Directory)
        return info
