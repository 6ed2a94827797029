"""`spark-abs doctor` against a server of each kind, in processes of their own; only one test starts a JVM."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from pyarrow import fs

from spark_abs.store.storage import Place
from tests.jvm import java_options
from tests.stores.server import Azurite, Gcs, LaxMoto, Moto, Server

pytestmark = pytest.mark.timeout(1800)

PROGRAM = """
import sys

import spark_abs.cli.doctor as doctor
from spark_abs.cli.main import main

seconds, spark, *words = sys.argv[1:]
if spark == "no":
    sys.modules.update(pyspark=None, py4j=None)
if seconds != "its own":
    doctor._ANSWERS_S = float(seconds)
main(["doctor", *words, "--output", "json"], prog_name="spark-abs")
"""
COMMITS, LEFT = "commits in the root", "what is left in the root"


def doctor(
    root: str, environment: Mapping[str, str], *, seconds: str = "its own", spark: str = "no"
) -> dict[str, tuple[str, str]]:
    """Return the verdict and sentence of each part. It ends by itself, long before the limit here."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, seconds, spark, root],
        capture_output=True,
        text=True,
        env={**os.environ, "PYSPARK_PYTHON": sys.executable, **environment},
        timeout=1200,
    )
    found = {one["part"]: (one["verdict"], one["says"]) for one in json.loads(done.stdout)}
    works = {verdict for verdict, _ in found.values()} == {"works"}
    assert done.returncode == (0 if works else 1), (done.stdout, done.stderr)
    return found


def nothing_at(place: Place) -> bool:
    """Say whether a store has neither an object nor the mark of a directory at a place or below it."""
    return bool(place.fs.get_file_info(place.path).type is fs.FileType.NotFound)


def test_writers_race_in_the_root_and_leave_nothing(server: Server) -> None:
    top = server.storage.place(f"{server.top}/doctor")
    found = doctor(top.below("new/root").uri, server.environment)
    assert found[COMMITS] == ("works", "of 4 writers at once exactly one made each of 10 commits")
    assert found["pyspark"][0] == "fails"
    assert found["a job"] == ("untried", "needs pyspark")
    if isinstance(server, Moto):  # whose client marks the directory above one that it deletes
        root = top.below("new/root")
        assert found[LEFT] == ("works", f"an empty directory, {root}, which was not there before")
        assert root.fs.get_file_info(fs.FileSelector(root.path, recursive=True)) == []
    else:
        assert found[LEFT] == ("works", "nothing")
        assert nothing_at(top)

    kept = server.storage.place(f"{server.top}/kept")
    kept.write("root/mine", b"x")
    assert doctor(kept.below("root").uri, server.environment)[LEFT] == ("works", "nothing")
    infos = kept.fs.get_file_info(fs.FileSelector(kept.path, recursive=True))
    assert [info.path for info in infos if info.is_file] == [f"{kept.path}/root/mine"]


def test_a_bucket_that_is_not_there_is_named(server: Server) -> None:
    root = f"{server.top.replace('bucket', 'absent', 1)}/root"
    found = doctor(root, server.environment)
    verdict, says = found[COMMITS]
    assert verdict == "fails"
    assert "404 Not Found" in says
    assert found["session"] == ("untried", f"needs {COMMITS}")
    assert found[LEFT][0] == "works"


def test_wrong_credentials_are_a_part_that_fails_without_their_text(server: Server, tmp_path: Path) -> None:
    wrong = {**server.environment}
    if isinstance(server, Gcs):
        # The server checks no signature; without a key the client cannot sign.
        hidden = "d3Jvbmctd3Jvbmctd3Jvbmc="
        key = f"-----BEGIN PRIVATE KEY-----\n{hidden}\n-----END PRIVATE KEY-----\n"
        said = json.loads(server.credentials.read_text())
        (tmp_path / "wrong.json").write_text(json.dumps({**said, "private_key": key}))
        wrong["GOOGLE_APPLICATION_CREDENTIALS"] = str(tmp_path / "wrong.json")
    elif isinstance(server, Azurite):
        wrong["SPARK_ABS_STORAGE_AZURE_ACCOUNT_KEY"] = hidden = "d3Jvbmctd3Jvbmctd3Jvbmc="
    else:
        wrong["SPARK_ABS_STORAGE_ACCESS_KEY_ID"] = "somebody"
        wrong["SPARK_ABS_STORAGE_SECRET_ACCESS_KEY"] = hidden = "another-secret-of-somebody"
    found = doctor(f"{server.top}/refused/root", wrong, seconds="60")
    assert found[COMMITS][0] == "fails", found
    assert not [says for _, says in found.values() if hidden in says]
    assert nothing_at(server.storage.place(f"{server.top}/refused"))


@pytest.fixture
def silent() -> Iterator[str]:
    """The address of a server that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


def test_a_store_that_does_not_answer_ends_in_time(server: Server, silent: str, tmp_path: Path) -> None:
    """No trial of it ends: the command does."""
    changed = {name: value.replace(server.endpoint, silent) for name, value in server.environment.items()}
    if isinstance(server, Gcs):
        credentials = tmp_path / "credentials.json"
        credentials.write_text(server.credentials.read_text().replace(server.endpoint, silent))
        changed["GOOGLE_APPLICATION_CREDENTIALS"] = str(credentials)
    found = doctor(f"{server.top}/root", changed, seconds="3")
    assert found[COMMITS] == ("fails", "no answer within 3 s")
    assert found[LEFT][0] == "fails"
    assert found["a job"][0] == "untried"


def test_a_store_that_replaces_what_is_there_fails(server: Server, tmp_path: Path) -> None:
    if not isinstance(server, Moto):
        pytest.skip("the other servers have no such variant")
    with LaxMoto(tmp_path) as lax:
        found = doctor(f"{lax.top}/lax/root", lax.environment)
        assert found[COMMITS][0] == "fails"
        assert (
            "commits of version 1: the store does not create a file only where there is none"
            in (found[COMMITS][1])
        )
        assert "lax/root, which was not there before" in found[LEFT][1]


def test_all_parts_work_in_a_store(server: Server, tmp_path: Path) -> None:
    """Google's is left out: the connector that a session takes cannot be told of a server of one's own."""
    if isinstance(server, Gcs):
        pytest.skip("hadoop-gcp takes no endpoint")
    conf = {"spark.driver.extraJavaOptions": java_options(), **server.conf}
    (tmp_path / "spark-defaults.conf").write_text("".join(f"{k} {v}\n" for k, v in conf.items()))
    root = server.storage.place(f"{server.top}/all/root")
    environment = {**server.environment, "SPARK_CONF_DIR": str(tmp_path), "SPARK_LOCAL_IP": "127.0.0.1"}
    found = doctor(root.uri, environment, spark="yes")
    assert {verdict for verdict, _ in found.values()} == {"works"}, found
    assert f"written and read at {root}/_doctor-" in found["Delta in Spark"][1]
    infos = root.fs.get_file_info(fs.FileSelector(f"{root.path}", allow_not_found=True, recursive=True))
    assert infos == []
