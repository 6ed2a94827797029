"""Places: locations in one form, and the clients and options that reach them."""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from datetime import timedelta
from functools import cached_property, lru_cache
from urllib.parse import quote, urlparse

from pyarrow import fs

from spark_abs.codec import decoded
from spark_abs.errors import ConfigError, UsageError
from spark_abs.settings import Settings
from spark_abs.store.directories import in_azure, in_google
from spark_abs.store.options import S3, Azure, Google

_S3, _AZURE, _GOOGLE = (
    "s3://BUCKET/PATH",
    "abfss://CONTAINER@ACCOUNT.dfs.core.windows.net/PATH",
    "gs://BUCKET/PATH",
)
_FORMS = f"{_S3}, {_AZURE} or {_GOOGLE}"
_IN_STORES = ("s3a:", "abfss:", "gs:")
_OTHER_NAMES = {
    **dict.fromkeys(("az", "azure", "abfs", "adl", "wasb", "wasbs"), _AZURE),
    "gcs": _GOOGLE,
    "s3n": _S3,
}
"""Schemes by which some library reaches a supported store, and the form that all libraries accept."""
_AUTHORITIES = {
    "s3": (re.compile("[^@]+"), _S3),
    "s3a": (re.compile("[^@]+"), "s3a://BUCKET/PATH"),
    "abfss": (
        re.compile(r"[a-z0-9][a-z0-9-]{1,61}[a-z0-9]@[a-z0-9]{3,24}\.dfs\.core\.windows\.net"),
        _AZURE,
    ),
    "gs": (re.compile("[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]"), _GOOGLE),
}
"""For each scheme of an object store: the part before the path, and the form in errors."""

_NOT_IN_ROOTS = re.compile(r"[\[\]^|\\\x00-\x1f\x7f]|%[0-9A-Fa-f]{2}")
"""What deltalake 1 refuses, or takes for another character, in the path of a table."""

_NAMES = {
    "abfss": " with a container of 3 to 63 and an account of 3 to 24 small letters and digits",
    "gs": " with a bucket of 3 to 222 small letters, digits, points and hyphens",
}
"""What names each scheme takes, where they are few."""

DATABRICKS = "DATABRICKS_RUNTIME_VERSION"
"""A variable of the environment that Databricks' compute has."""
_MOUNTS = ("/Volumes/", "/dbfs/")
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_LONGEST = 800
_RETRIES = timedelta(minutes=1)
_PIECE = 2**23
"""Bytes that a copy holds in memory."""


def location_of(uri: str) -> str:
    """Return `uri` in its stored form, which Spark, deltalake and `Place` all accept.

    Local paths become absolute; `s3://` becomes `s3a://`, Hadoop's name for it.

    Raises:
        UsageError: it is empty, has more parts than a bucket or container and a path, or names a store by a
            scheme that some library does not know.
    """
    if not uri:
        raise UsageError("the path is empty")
    try:
        parsed = urlparse(uri)
    except ValueError:  # whose text may show credentials
        raise UsageError("a location must be a path, or a URL such as s3://BUCKET/PATH") from None
    scheme = parsed.scheme
    if scheme in _OTHER_NAMES:
        raise UsageError(
            f"{scheme}:// is not supported, because not every library knows it: write {_OTHER_NAMES[scheme]}"
        )
    if scheme in _AUTHORITIES:
        authority, form = _AUTHORITIES[scheme]
        # Locations are stored and shown: credentials must not be part of them.
        if not authority.fullmatch(parsed.netloc) or parsed.query or parsed.fragment:
            raise UsageError(
                f"a location in an object store is {form}{_NAMES.get(scheme, '')}, without credentials or "
                "options: these are settings, spark.abs.storage.*"
            )
        return f"{'s3a' if scheme == 's3' else scheme}://{parsed.netloc}{parsed.path.rstrip('/')}"
    if scheme == "file":
        uri = parsed.path
    elif scheme:
        return uri.rstrip("/")
    return os.path.abspath(os.path.expanduser(uri))


def table_location(uri: str) -> str:
    """Return `uri` as `location_of` does, if commits can be made there.

    Raises:
        UsageError: they cannot, or as `location_of`.
    """
    location = location_of(uri)
    if location.startswith("dbfs:") or (DATABRICKS in os.environ and location.startswith(_MOUNTS)):
        raise UsageError(
            f"neither a root nor a table can be in {location}: Databricks' file systems cannot create a file "
            "only where there is none, as each commit must; give a directory in the object store below, "
            f"{_FORMS}"
        )
    return location


def root_location(uri: str) -> str:
    """Return `uri` as `table_location` does, if the root of a job can be there.

    Raises:
        UsageError: it cannot, or as `table_location`.
    """
    location = table_location(uri)
    local = os.path.isabs(location)
    if found := _NOT_IN_ROOTS.search(location):
        raise UsageError(
            f"a root cannot be at {location!r}: deltalake does not find tables below a directory with "
            f"{found[0]!r} in its name; give another directory"
        )
    if DATABRICKS in os.environ and local:
        raise UsageError(
            f"a root on Databricks cannot be at {location}: Spark there looks for such a path in dbfs:, and "
            f"commits of a root go to the driver's disk; give a directory in an object store, {_FORMS}"
        )
    if not local and not in_object_store(location):
        raise UsageError(
            f"a root cannot be in {urlparse(location).scheme}: give a path (as ./NAME if it has a colon), "
            f"file:///PATH, {_FORMS}"
        )
    return location


def in_object_store(location: str) -> bool:
    """Say whether a connector of Hadoop serves a location."""
    return location.startswith(_IN_STORES)


def names_of(uris: Sequence[str]) -> list[str]:
    """Return short names: the last part of each location, the whole one where several end alike."""
    last = [uri.rstrip("/").rpartition("/")[2] for uri in uris]
    return [name if last.count(name) == 1 else uri for name, uri in zip(last, uris, strict=True)]


def remedy(location: str) -> str:
    """Return advice for a location that cannot be read or written."""
    if location.startswith("s3a:"):
        return "try again, or check credentials, region and endpoint (spark.abs.storage.*, AWS_...)"
    if location.startswith("abfss:"):
        return "try again, or check credentials (spark.abs.storage.azure..., AZURE_...)"
    if location.startswith("gs:"):
        return "try again, or check credentials (GOOGLE_APPLICATION_CREDENTIALS, or the machine's role)"
    return "try again"


def told(error: BaseException) -> str:
    """Return the text of an error in one line: deltalake writes the causes below, each behind an arrow."""
    found = ""
    for line in _COLOURS.sub("", str(error)).splitlines():
        text = line.strip()
        cause = text.removeprefix("\u21b3").strip()
        found += (": " if cause != text and found else " ") + cause
    found = found.strip()
    return found if len(found) <= _LONGEST else f"{found[:_LONGEST]}..."


@dataclass(frozen=True)
class Storage:
    """How each kind of store is reached."""

    s3: S3 = field(default_factory=S3)
    azure: Azure = field(default_factory=Azure)
    google: Google = field(default_factory=Google)

    @classmethod
    def of(cls, settings: Settings) -> Storage:
        """Return the options in the settings of the area `storage` and in the usual variables of Azure."""
        s3, azure, google = (
            {f.name: getattr(settings, f.name) for f in fields(kind)} for kind in (S3, Azure, Google)
        )
        return cls(S3(**s3), Azure(**azure).or_from(os.environ), Google(**google))

    @classmethod
    def given(
        cls, spark_conf: Mapping[str, str] | None = None, arguments: Mapping[str, object] | None = None
    ) -> Storage:
        """Return the options from the environment, a session's configuration and arguments.

        Raises:
            ConfigError: a name is unknown, or a value cannot be read.
        """
        known = {f.name for kind in (S3, Azure, Google) for f in fields(kind)}
        others = sorted((arguments or {}).keys() - known)
        if others:
            raise ConfigError(f"{others[0]!r} is no setting of storage: give it to the job")
        return cls.of(Settings.resolve(None, os.environ, spark_conf or {}, arguments or {}))

    def delta(self, location: str) -> dict[str, str] | None:
        """Return the options for a location by deltalake's names; None for one that needs none."""
        if location.startswith("s3a:"):
            return self.s3.delta()
        if location.startswith("abfss:"):
            return self.azure.delta(_account(location))
        return self.google.delta() if location.startswith("gs:") else None

    def hadoop(self) -> dict[str, str]:
        """Return the options by the names of Hadoop's connectors, for a session's configuration."""
        return {**self.s3.hadoop(), **self.azure.hadoop(), **self.google.hadoop()}

    def hadoop_defaults(self, locations: Iterable[str]) -> tuple[dict[str, str], ...]:
        """Return settings for a session that has none of these names: a value for each kind of store.

        Args:
            locations: the places that the session must reach; other kinds of stores are left out.
        """
        places = tuple(locations)
        by_scheme = {"abfss:": self.azure.hadoop_defaults(), "gs:": self.google.hadoop_defaults()}
        return tuple(conf for scheme, conf in by_scheme.items() if any(p.startswith(scheme) for p in places))

    def place(self, uri: str) -> Place:
        """Return a place in this storage."""
        return Place(uri, self)


def _account(location: str) -> str:
    return urlparse(location).netloc.partition("@")[2].partition(".")[0]


DEFAULTS = Storage()
"""Nothing is given."""


@dataclass(frozen=True)
class Place:
    """A directory or a table: Spark uses `uri`, pyarrow `fs` and `path`. Picklable."""

    uri: str
    storage: Storage = field(default=DEFAULTS, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "uri", location_of(self.uri))

    def __reduce__(self) -> tuple[type[Place], tuple[str, Storage]]:
        return Place, (self.uri, self.storage)

    def __str__(self) -> str:
        return self.uri

    @cached_property
    def _resolved(self) -> tuple[fs.FileSystem, str]:
        parsed = urlparse(self.uri)
        if parsed.scheme == "s3a":
            return _s3(self.storage.s3, parsed.netloc), f"{parsed.netloc}{parsed.path}"
        if parsed.scheme == "abfss":
            container, _, _ = parsed.netloc.partition("@")
            return _azure(self.storage.azure, _account(self.uri)), f"{container}{parsed.path}"
        if parsed.scheme == "gs":
            return _google(self.storage.google), f"{parsed.netloc}{parsed.path}"
        filesystem, path = fs.FileSystem.from_uri(self.uri)
        return filesystem, path

    @property
    def fs(self) -> fs.FileSystem:
        return self._resolved[0]

    @property
    def path(self) -> str:
        return self._resolved[1]

    @property
    def local(self) -> bool:
        """Whether this is a path of the machine's own file system."""
        return isinstance(self.fs, fs.LocalFileSystem)

    @property
    def _in_azure(self) -> bool:
        return self.uri.startswith("abfss:")

    @property
    def options(self) -> dict[str, str] | None:
        """Options of deltalake to reach it."""
        return self.storage.delta(self.uri)

    @property
    def in_spark_files(self) -> str:
        """The place as Spark writes it into files: `file:/…` if it is local."""
        store = re.match(r"[a-z0-9]+://[^/]*", self.uri)
        return f"{store[0]}{quote(self.uri[store.end() :])}" if store else f"file:{quote(self.uri)}"

    def below(self, relative: str) -> Place:
        """Return a place below this one."""
        return Place(f"{self.uri}/{relative}", self.storage)

    def holds(self, other: Place) -> bool:
        """Say whether another place is this one or below it, whatever symbolic links lead there."""
        mine, theirs = (os.path.realpath(uri) if os.path.isabs(uri) else uri for uri in (self.uri, other.uri))
        return f"{theirs}/".startswith(f"{mine}/")

    def exists(self) -> bool:
        """Say whether the place exists. In an object store a directory exists if it has content."""
        return bool(self.fs.get_file_info(self.path).type != fs.FileType.NotFound)

    def read(self, relative: str) -> bytes | None:
        """Read a small file, None if there is none."""
        try:
            with self.fs.open_input_stream(f"{self.path}/{relative}") as stream:
                return bytes(stream.read())
        except FileNotFoundError:
            return None

    def read_text(self, relative: str) -> str | None:
        """Read a small text file, None if there is none.

        Raises:
            DamageError: it is not UTF-8.
        """
        data = self.read(relative)
        return None if data is None else decoded(data, f"{self}/{relative}")

    def write(self, relative: str, data: bytes) -> None:
        """Write a small file atomically: a reader sees the whole new file or the old one.

        Only for files that any writer may overwrite and that decide nothing.
        """
        store, target = self.fs, f"{self.path}/{relative}"
        if self._in_azure:  # which begins a file with an empty one: deltalake does not
            from deltalake.fs import DeltaStorageHandler  # gates do without deltalake

            store, target = fs.PyFileSystem(DeltaStorageHandler(self.uri, self.options)), relative
        written = f"{target}.{uuid.uuid4().hex}.tmp" if self.local else target
        if self.local:
            store.create_dir(os.path.dirname(target), recursive=True)
        with store.open_output_stream(written, compression=None, buffer_size=len(data) + 1) as stream:
            stream.write(data)
        if self.local:
            store.move(written, target)

    def move(self, source: str, target: str) -> None:
        """Move a file, in place of one that is at the target.

        After a kill the source may be there still, and a target that is not whole beside it: move it again.

        Raises:
            OSError: there is no source, or the store cannot be written.
        """
        here, there = f"{self.path}/{source}", f"{self.path}/{target}"
        if self.local:
            self.fs.create_dir(os.path.dirname(there), recursive=True)
        if not self._in_azure:
            self.fs.move(here, there)
            return
        # It moves only in accounts with a hierarchical namespace.
        with self.fs.open_input_stream(here, compression=None) as taken:
            with self.fs.open_output_stream(there, compression=None) as made:
                while piece := taken.read(_PIECE):
                    made.write(piece)
        self.fs.delete_file(here)

    def remove(self, relative: str) -> None:
        """Delete a file, if it is there.

        Raises:
            OSError: the store cannot be written.
        """
        with suppress(FileNotFoundError):
            self.fs.delete_file(f"{self.path}/{relative}")

    def create(self, relative: str, data: bytes) -> bool:
        """Write a small file if there is none; say whether it was written.

        Exact on a local disk: of several writers one succeeds, as of Spark's. In an object store it looks
        first, as Spark does there.
        """
        target = f"{self.path}/{relative}"
        if not self.local:
            if self.below(relative).exists():
                return False
            self.write(relative, data)
            return True
        self.fs.create_dir(os.path.dirname(target), recursive=True)
        written = f"{os.path.dirname(target)}/.{os.path.basename(target)}.{uuid.uuid4().hex}.tmp"
        with open(written, "xb") as stream:
            stream.write(data)
        try:
            os.link(written, target)
        except FileExistsError:
            return False
        finally:
            os.unlink(written)
        return True


@lru_cache(maxsize=64)
def _s3(storage: S3, bucket: str) -> fs.FileSystem:
    """Return one client for all places of a bucket: each has connections of its own."""
    given = storage.arrow()
    if not storage.endpoint and not storage.region:
        given["region"] = fs.FileSystem.from_uri(f"s3://{bucket}")[0].region  # asks the store
    # A small file is then one request, not three.
    return fs.S3FileSystem(**given, allow_delayed_open=True)


@lru_cache(maxsize=64)
def _azure(storage: Azure, account: str) -> fs.FileSystem:
    return in_azure(fs.AzureFileSystem(**storage.arrow(account)))


@lru_cache(maxsize=64)
def _google(storage: Google) -> fs.FileSystem:
    # Its own limit is 15 minutes, also where credentials are wrong.
    return in_google(fs.GcsFileSystem(**storage.arrow(), retry_time_limit=_RETRIES))
