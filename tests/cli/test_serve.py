"""`spark-abs serve`: who is answered, how a page follows a job, what probes and Prometheus are told."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path

import pytest
from click.testing import CliRunner

from spark_abs.cli.main import main
from spark_abs.diagnosis.health import read_health
from spark_abs.observe.metrics import read_metrics
from spark_abs.report.reading import RootReader
from spark_abs.report.server import Fresh, PageServer, Served, is_allowed, snapshot
from tests.cli.conftest import Cli
from tests.cli.test_status import NOW, tell
from tests.root_support import SmallJob


class Clock:
    """A clock that tests move."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@contextmanager
def serving(job: SmallJob, clock: Clock) -> Iterator[PageServer]:
    reader = RootReader(job.root)
    served = Served(
        Fresh(lambda: snapshot(reader, 99_000), clock),
        Fresh(lambda: read_metrics(job.root, NOW), clock),
        Fresh(lambda: read_health(job.root, NOW, None, 20_000), clock),
    )
    with PageServer("127.0.0.1", 0, served) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def ask(server: PageServer, path: str, method: str = "GET", **headers: str) -> tuple[HTTPResponse, str]:
    connection = HTTPConnection("127.0.0.1", server.server_address[1], timeout=60)
    try:
        connection.request(method, path, headers={k.replace("_", "-"): v for k, v in headers.items()})
        answer = connection.getresponse()
        return answer, answer.read().decode()
    finally:
        connection.close()


def test_a_page_is_served_and_follows_the_job(job: SmallJob) -> None:
    job.checkpoint(1)
    clock = Clock()
    with serving(job, clock) as server:
        answer, page = ask(server, "/")
        assert answer.status == 200
        assert page.startswith("<!doctype html>")
        assert "connect-src 'self'" in str(answer.headers["Content-Security-Policy"])
        first, text = ask(server, "/data.json")
        etag = str(first.headers["ETag"])
        assert len(json.loads(text)["checkpoints"]["id"]) == 1
        clock.now += 5
        assert ask(server, "/data.json", If_None_Match=etag)[0].status == 304
        job.checkpoint(2)
        assert ask(server, "/data.json", If_None_Match=etag)[0].status == 304, "read at most once a second"
        clock.now += 5
        answer, text = ask(server, "/data.json", If_None_Match=etag)
        assert answer.status == 200
        assert len(json.loads(text)["checkpoints"]["id"]) == 2


def test_prometheus_is_told_what_the_command_prints(job: SmallJob, cli: Cli) -> None:
    job.checkpoint(1)
    job.come_alive()
    tell(job)
    with serving(job, Clock()) as server:
        answer, text = ask(server, "/metrics")
    assert (answer.status, text) == (200, cli("metrics").stdout)
    assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"


def test_a_probe_learns_the_health_of_the_job_and_another_that_the_server_lives(job: SmallJob) -> None:
    job.checkpoint(1)
    clock = Clock()
    with serving(job, clock) as server:
        assert [ask(server, "/readyz")[0].status, ask(server, "/healthz")[0].status] == [503, 200]
        job.come_alive()
        assert ask(server, "/readyz")[1] == "unhealthy: no run is alive: it was killed\n", "of a second ago"
        clock.now += 5
        answer, said = ask(server, "/readyz")
        assert (answer.status, said) == (503, "unhealthy: the run has not told its lag\n")
        tell(job)
        clock.now += 5
        late = "unhealthy: stage b is 30.0 s behind, more than 20.0 s are too many\n"
        assert ask(server, "/readyz")[1] == late


def test_nothing_but_the_page_is_there_and_nothing_can_be_sent(job: SmallJob) -> None:
    with serving(job, Clock()) as server:
        for path in ("/../control/_lease.json", "/control", "//etc/passwd", "/data.json/x"):
            assert ask(server, path)[0].status == 404
        assert ask(server, "/", "POST")[0].status == 501
        assert ask(server, "/", "HEAD")[1] == ""


def test_a_root_that_cannot_be_read_any_more_is_told(job: SmallJob) -> None:
    clock = Clock()
    with serving(job, clock) as server:
        assert ask(server, "/")[0].status == 200
        log = Path(job.root.path("control/_delta_log"))
        newest = max(log.glob("*.json"))
        (log / f"{int(newest.stem) + 1:020d}.json").write_text("no commit")
        clock.now += 5
        for path in ("/data.json", "/metrics", "/readyz"):
            answer, text = ask(server, path)
            assert answer.status == 503
            assert "control" in text
        assert ask(server, "/healthz")[0].status == 200


@pytest.mark.parametrize(
    ("host", "own", "allowed"),
    [
        ("127.0.0.1:4180", "127.0.0.1", True),
        ("localhost", "127.0.0.1", True),
        ("[::1]:4180", "127.0.0.1", True),
        ("10.0.0.7:80", "0.0.0.0", True),
        ("driver.lan:4180", "driver.lan", True),
        (socket.gethostname(), "0.0.0.0", True),
        ("evil.example:4180", "127.0.0.1", False),
        ("127.0.0.1.evil.example", "127.0.0.1", False),
        ("", "127.0.0.1", False),
    ],
)
def test_a_name_that_may_be_rebound_is_refused(host: str, own: str, allowed: bool) -> None:
    assert is_allowed(host, own) is allowed


def test_a_page_elsewhere_cannot_read_through_its_own_name(job: SmallJob) -> None:
    with serving(job, Clock()) as server:
        for path in ("/data.json", "/metrics", "/readyz", "/healthz"):
            answer, text = ask(server, path, Host="evil.example")
            assert (answer.status, "use its address" in text) == (403, True)


def test_the_command_listens_on_this_machine_alone_and_warns_elsewhere(
    job: SmallJob, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    listened, told = [], []

    def interrupted(server: PageServer) -> None:
        listened.append(server.server_address[0])
        told.append(server.served.health.newest().line)
        raise KeyboardInterrupt

    monkeypatch.setattr(PageServer, "serve_forever", interrupted)
    done = cli("serve", "--port", "0", "--max-age", "5m")
    assert done.stdout.startswith("http://127.0.0.1:")
    assert "warning" not in done.stderr
    done = cli("serve", "--port", "0", "--host", "0.0.0.0")
    assert "warning: everyone who reaches 0.0.0.0 can see the page" in done.stderr
    assert listened == ["127.0.0.1", "0.0.0.0"]
    assert ["more than 5.0 min are too many" in line for line in told] == [True, False]
    assert "--max-lag" in cli("serve", "--max-lag", "soon", exits=2).stderr


def test_a_port_that_is_taken_and_a_place_without_a_job_are_errors(
    job: SmallJob, cli: Cli, tmp_path: Path
) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        assert "choose another --port" in cli("serve", "--port", str(other.getsockname()[1]), exits=2).stderr
    assert CliRunner().invoke(main, ["serve", str(tmp_path)]).exit_code == 2
