"""A REST catalog of the tests' own: Iceberg's reference server, over a database in memory."""

from __future__ import annotations

import os
import subprocess
import tempfile
import threading
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from urllib.error import URLError
from urllib.request import urlopen

from tests.ports import free_port

VERSION = "1.11.0"
PATIENCE_S = 120
_JETTY, _SQLITE = "12.1.5", "3.50.3.0"
_JAVA = ("-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Djava.net.preferIPv4Stack=true")
_CACHE = Path.home() / ".ivy2.5.2" / "cache"
_IVY = f"""<ivy-module version="2.0" xmlns:m="http://ant.apache.org/ivy/maven">
  <info organisation="spark_abs" module="rest-catalog"/>
  <dependencies>
    <dependency org="org.apache.iceberg" name="iceberg-open-api" rev="{VERSION}" conf="default->master">
      <artifact name="iceberg-open-api" type="jar" ext="jar" m:classifier="test-fixtures"/>
    </dependency>
    <dependency org="org.apache.iceberg" name="iceberg-core" rev="{VERSION}" conf="default->default">
      <artifact name="iceberg-core" type="jar" ext="jar"/>
      <artifact name="iceberg-core" type="jar" ext="jar" m:classifier="tests"/>
    </dependency>
    <dependency org="org.eclipse.jetty.ee10" name="jetty-ee10-servlet" rev="{_JETTY}"
      conf="default->default"/>
    <dependency org="org.eclipse.jetty.compression" name="jetty-compression-server" rev="{_JETTY}"
      conf="default->default"/>
    <dependency org="org.eclipse.jetty.compression" name="jetty-compression-gzip" rev="{_JETTY}"
      conf="default->default"/>
    <dependency org="org.xerial" name="sqlite-jdbc" rev="{_SQLITE}" conf="default->master"/>
  </dependencies>
</ivy-module>
"""


class RestCatalog:
    """Ends with the test, and its tables with it; their files are below `warehouse`."""

    def __init__(self, warehouse: Path) -> None:
        self.port = free_port()
        self.properties = {"type": "rest", "uri": f"http://127.0.0.1:{self.port}"}
        self._log = warehouse.with_name(f"{warehouse.name}.log")
        settings = {
            "CATALOG_WAREHOUSE": f"file://{warehouse}",
            "CATALOG_URI": "jdbc:sqlite::memory:",
            "CATALOG_REST_PORT": str(self.port),
        }
        home = os.environ.get("JAVA_HOME")
        java = str(Path(home) / "bin" / "java") if home else "java"
        path = os.pathsep.join([*classpath(), *map(str, _spark("hadoop-client-*.jar", "log4j-*.jar"))])
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(
                [java, *_JAVA, "-cp", path, "org.apache.iceberg.rest.RESTCatalogServer"],
                env={**os.environ, **settings},
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self._wait()

    def __enter__(self) -> RestCatalog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait(PATIENCE_S)

    def _wait(self) -> None:
        pause = threading.Event()
        for _ in range(PATIENCE_S * 10):
            assert self._process.poll() is None, self._log.read_text()
            try:
                with urlopen(f"{self.properties['uri']}/v1/config", timeout=10) as answer:
                    assert answer.status == 200
                    return
            except (URLError, TimeoutError, ConnectionError):
                pause.wait(0.1)
        raise TimeoutError(self._log.read_text())


def classpath() -> list[str]:
    """Find the server's jars, fetched through Ivy the first time, as Spark fetches its packages."""
    kept = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "spark_abs"
    listed = kept / f"iceberg-rest-{VERSION}.classpath"
    jars = listed.read_text().strip().split(os.pathsep) if listed.exists() else []
    if jars and all(Path(jar).exists() for jar in jars):
        return jars
    kept.mkdir(parents=True, exist_ok=True)
    new = listed.with_name(f".{listed.name}.{os.getpid()}")
    ivy = os.pathsep.join(map(str, _spark("ivy-*.jar", "commons-cli-*.jar")))
    with tempfile.NamedTemporaryFile("w", suffix=".xml") as wanted:
        wanted.write(_IVY)
        wanted.flush()
        fetch = [
            *("java", "-cp", ivy, "org.apache.ivy.Main", "-cache", str(_CACHE), "-ivy", wanted.name),
            *("-confs", "default", "-cachepath", str(new)),
        ]
        done = subprocess.run(fetch, capture_output=True, text=True)
    jars = new.read_text().strip().split(os.pathsep) if new.exists() else []
    parts = ("test-fixtures.jar", f"iceberg-core-{VERSION}-tests.jar", "jetty-ee10-servlet", "sqlite-jdbc")
    missing = [part for part in parts if not any(part in jar for jar in jars)]
    assert not missing, (
        f"no REST catalog: {', '.join(missing)} could not be fetched; Maven Central must be reachable once: "
        f"python -m tests.outside.rest_catalog\n{done.stdout[-2000:]}"
    )
    new.replace(listed)
    return jars


def _spark(*patterns: str) -> list[Path]:
    """Find jars that Spark brings along."""
    spec = find_spec("pyspark")
    assert spec is not None
    assert spec.origin is not None
    return [jar for pattern in patterns for jar in (Path(spec.origin).parent / "jars").glob(pattern)]


if __name__ == "__main__":
    classpath()
