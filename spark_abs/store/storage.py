"""How storage is reached. Only this module knows the option names of pyarrow, deltalake and Hadoop."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property, lru_cache
from urllib.parse import quote, urlparse

from pyarrow import fs

from spark_abs.errors import ConfigError, UsageError
from spark_abs.settings import Settings

_S3 = ("s3", "s3a")


DATABRICKS = "DATABRICKS_RUNTIME_VERSION"
"""A variable of the environment that Databricks' compute has."""
_MOUNTS = ("/Volumes/", "/dbfs/")


def location_of(uri: str) -> str:
    """Return `uri` in its stored form, which Spark, deltalake and `Place` all accept.

    Local paths become absolute; `s3://` becomes `s3a://`, Hadoop's name for it.

    Raises:
        UsageError: it is empty, or has more parts than a bucket and a path.
    """
    if not uri:
        raise UsageError("the path is empty")
    try:
        parsed = urlparse(uri)
    except ValueError:  # whose text may show credentials
        raise UsageError("a location must be a path, or a URL such as s3://BUCKET/PATH") from None
    if parsed.scheme in _S3:
        # What a location holds is stored and shown: credentials must not be part of it.
        if "@" in parsed.netloc or parsed.query or parsed.fragment or not parsed.netloc:
            raise UsageError(
                f"a location in an object store is {parsed.scheme}://BUCKET/PATH without credentials or "
                "options: these are settings, spark.abs.storage.*"
            )
        return f"s3a://{parsed.netloc}{parsed.path.rstrip('/')}"
    if parsed.scheme == "file":
        uri = parsed.path
    elif parsed.scheme:
        return uri.rstrip("/")
    return os.path.abspath(os.path.expanduser(uri))


def root_location(uri: str) -> str:
    """Return `uri` as `location_of` does, if the root of a job can be there.

    Raises:
        UsageError: it cannot, or as `location_of`.
    """
    location = location_of(uri)
    on_databricks = DATABRICKS in os.environ and os.path.isabs(location)
    if location.startswith("dbfs:") or (on_databricks and location.startswith(_MOUNTS)):
        raise UsageError(
            f"a root cannot be in {location}: Databricks' file systems cannot create a file only where there "
            "is none, as each commit must; give a directory in an object store, s3://BUCKET/PATH"
        )
    if on_databricks:
        raise UsageError(
            f"a root on Databricks cannot be at {location}: Spark there looks for such a path in dbfs:, and "
            "commits of a root go to the driver's disk; give a directory in an object store, s3://BUCKET/PATH"
        )
    if not os.path.isabs(location) and not in_object_store(location):
        raise UsageError(
            f"a root cannot be in {urlparse(location).scheme}: give a path (as ./NAME if it has a colon), "
            "file:///PATH, s3://BUCKET/PATH or s3a://BUCKET/PATH"
        )
    return location


def in_object_store(location: str) -> bool:
    """Say whether Hadoop's S3A connector serves a location."""
    return location.startswith("s3a:")


def remedy(location: str) -> str:
    """Return advice for a location that cannot be read or written."""
    if in_object_store(location):
        return "try again, or check credentials, region and endpoint (spark.abs.storage.*, AWS_...)"
    return "try again"


@dataclass(frozen=True)
class Storage:
    """How an S3-compatible store is reached. Empty options take the defaults of each library.

    Those are the usual variables `AWS_…` and, on a machine in the cloud, its own role.
    """

    endpoint: str = ""
    """URL of a store that is not Amazon's."""
    region: str = ""
    access_key_id: str = field(default="", repr=False)
    secret_access_key: str = field(default="", repr=False)
    session_token: str = field(default="", repr=False)
    allow_http: bool = False
    """Whether the endpoint may be reached without encryption."""

    def __post_init__(self) -> None:
        """Refuse options that do not fit together.

        Raises:
            UsageError: they do not.
        """
        if bool(self.access_key_id) != bool(self.secret_access_key):
            raise UsageError("storage has only one of accessKeyId and secretAccessKey: set both, or neither")
        if self.session_token and not self.access_key_id:
            raise UsageError(
                "storage has a sessionToken and no accessKeyId: set the keys that belong to the token"
            )
        try:
            scheme = urlparse(self.endpoint).scheme
        except ValueError:
            scheme = ""
        if self.endpoint and (scheme not in ("http", "https") or "@" in self.endpoint):
            raise UsageError("the endpoint of storage must be a URL such as https://HOST:PORT")
        if scheme == "http" and not self.allow_http:
            raise UsageError(
                f"the endpoint {self.endpoint} is not encrypted: use https, or set allowHttp=true"
            )

    @classmethod
    def of(cls, settings: Settings) -> Storage:
        """Return the options in the settings of the area `storage`."""
        return cls(**{f.name: getattr(settings, f.name) for f in fields(cls)})

    @classmethod
    def given(
        cls, spark_conf: Mapping[str, str] | None = None, arguments: Mapping[str, object] | None = None
    ) -> Storage:
        """Return the options from the environment, a session's configuration and arguments.

        Raises:
            ConfigError: a name is unknown, or a value cannot be read.
        """
        others = sorted((arguments or {}).keys() - {f.name for f in fields(cls)})
        if others:
            raise ConfigError(f"{others[0]!r} is no setting of storage: give it to the job")
        return cls.of(Settings.resolve(None, os.environ, spark_conf or {}, arguments or {}))

    def delta(self) -> dict[str, str]:
        """Return the options by deltalake's names.

        A commit must never replace an existing one: the store refuses the second of two (If-None-Match).
        """
        return _given(
            {
                "AWS_ENDPOINT_URL": self.endpoint,
                "AWS_REGION": self.region,
                "AWS_ACCESS_KEY_ID": self.access_key_id,
                "AWS_SECRET_ACCESS_KEY": self.secret_access_key,
                "AWS_SESSION_TOKEN": self.session_token,
                "AWS_ALLOW_HTTP": "true" if self.allow_http else "",
                "AWS_CONDITIONAL_PUT": "etag",
            }
        )

    def hadoop(self) -> dict[str, str]:
        """Return the options by the names of Hadoop's S3A connector, for a session's configuration."""
        return _given(
            {
                "fs.s3a.endpoint": self.endpoint,
                "fs.s3a.endpoint.region": self.region,
                "fs.s3a.access.key": self.access_key_id,
                "fs.s3a.secret.key": self.secret_access_key,
                "fs.s3a.session.token": self.session_token,
                # Stores other than Amazon's seldom have a name in DNS for each bucket.
                "fs.s3a.path.style.access": "true" if self.endpoint else "",
            }
        )

    def arrow(self) -> dict[str, str]:
        """Return the options by the names of `pyarrow.fs.S3FileSystem`."""
        return _given(
            {
                "endpoint_override": self.endpoint,
                "region": self.region,
                "access_key": self.access_key_id,
                "secret_key": self.secret_access_key,
                "session_token": self.session_token,
            }
        )

    def place(self, uri: str) -> Place:
        """Return a place in this storage."""
        return Place(uri, self)


def _given(options: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in options.items() if value}


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
        if parsed.scheme != "s3a":
            filesystem, path = fs.FileSystem.from_uri(self.uri)
            return filesystem, path
        return _s3(self.storage, parsed.netloc), f"{parsed.netloc}{parsed.path}"

    @property
    def fs(self) -> fs.FileSystem:
        """The file system."""
        return self._resolved[0]

    @property
    def path(self) -> str:
        """The path in `fs`."""
        return self._resolved[1]

    @property
    def local(self) -> bool:
        """Whether this is a path of the machine's own file system."""
        return isinstance(self.fs, fs.LocalFileSystem)

    @property
    def options(self) -> dict[str, str] | None:
        """Options of deltalake to reach it."""
        return self.storage.delta() if in_object_store(self.uri) else None

    @property
    def in_spark_files(self) -> str:
        """The place as Spark writes it into files: `file:/…` if it is local."""
        scheme, colon, rest = self.uri.partition("://")
        return f"{scheme}{colon}{quote(rest)}" if colon else f"file:{quote(self.uri)}"

    def below(self, relative: str) -> Place:
        """Return a place below this one."""
        return Place(f"{self.uri}/{relative}", self.storage)

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

    def write(self, relative: str, data: bytes) -> None:
        """Write a small file atomically: a reader sees the whole new file or the old one.

        Only for files that any writer may overwrite and that decide nothing.
        """
        target = f"{self.path}/{relative}"
        written = f"{target}.{uuid.uuid4().hex}.tmp" if self.local else target
        if self.local:
            self.fs.create_dir(os.path.dirname(target), recursive=True)
        with self.fs.open_output_stream(written) as stream:
            stream.write(data)
        if self.local:
            self.fs.move(written, target)


@lru_cache(maxsize=64)
def _s3(storage: Storage, bucket: str) -> fs.FileSystem:
    """Return one client for all places of a bucket: each has connections of its own."""
    given = storage.arrow()
    if not storage.endpoint and not storage.region:
        given["region"] = fs.FileSystem.from_uri(f"s3://{bucket}")[0].region  # asks the store
    # A small file is then one request, not three.
    return fs.S3FileSystem(**given, allow_delayed_open=True)
