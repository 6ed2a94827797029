"""Metrics, alerts and dashboard in Prometheus itself, and in Grafana's own types."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

from tests.cli.conftest import Cli
from tests.cli.test_metrics import everything
from tests.cli.test_serve import Clock, serving
from tests.markdown_support import GUIDE
from tests.ports import free_port
from tests.root_support import SmallJob

RULES = GUIDE / "prometheus-rules.yml"
JOB = '{job_name="shop", instance="driver:4180"}'
STAGE = '{job_name="shop", instance="driver:4180", stage="match"}'
DISK = '{job_name="shop", instance="driver:4180", path="/data"}'

PROVOKED: dict[str, dict[str, str]] = {
    "SparkAbsNoMetrics": {},
    "SparkAbsJobDown": {f"spark_abs_up{JOB}": "0x60", f"spark_abs_finished{JOB}": "0x60"},
    "SparkAbsRunSilent": {f"spark_abs_told_age_seconds{JOB}": "130x60"},
    "SparkAbsStageFails": {f"spark_abs_restarts_without_progress{STAGE}": "2x60"},
    "SparkAbsCheckpointsFail": {f"spark_abs_failed_checkpoints_in_row{JOB}": "3x60"},
    "SparkAbsCheckpointOld": {
        f"spark_abs_uptime_seconds{JOB}": "901x60",
        f"spark_abs_last_checkpoint_age_seconds{JOB}": "5000x60",
    },
    "SparkAbsBatchHangs": {f"spark_abs_batch_under_way_seconds{STAGE}": "1801x60"},
    "SparkAbsStageBehind": {f"spark_abs_lag_seconds{STAGE}": "3601x60"},
    "SparkAbsStoreSlow": {f"spark_abs_store_write_seconds{JOB}": "1.5x60"},
    "SparkAbsDiskFull": {f"spark_abs_disk_free_bytes{DISK}": "2x60", f"spark_abs_disk_bytes{DISK}": "100x60"},
    "SparkAbsDiskFills": {
        f"spark_abs_disk_free_bytes{DISK}": "50000-40x60",
        f"spark_abs_disk_bytes{DISK}": "100000x60",
    },
}
"""Each alert, with series as promtool writes them: a value, its change, and how many minutes."""

HEALTHY = {
    f"spark_abs_up{JOB}": "1x60",
    f"spark_abs_finished{JOB}": "0x60",
    f"spark_abs_told_age_seconds{JOB}": "3x60",
    f"spark_abs_restarts_without_progress{STAGE}": "1x60",
    f"spark_abs_failed_checkpoints_in_row{JOB}": "2x60",
    f"spark_abs_uptime_seconds{JOB}": "901x60",
    f"spark_abs_last_checkpoint_age_seconds{JOB}": "880x60",
    f"spark_abs_batch_under_way_seconds{STAGE}": "1700x60",
    f"spark_abs_lag_seconds{STAGE}": "3500x60",
    f"spark_abs_store_write_seconds{JOB}": "0.9x60",
    f"spark_abs_disk_free_bytes{DISK}": "50000-1x60",
    f"spark_abs_disk_bytes{DISK}": "100000x60",
}
STOPPED = {f"spark_abs_up{JOB}": "0x60", f"spark_abs_finished{JOB}": "1x60"}
"""A bounded run that has read its input."""


def run(program: str, *arguments: str, given: str = "") -> str:
    path = shutil.which(program)
    assert path, f"{program} is missing: apt-get install prometheus"
    done = subprocess.run([path, *arguments], input=given, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def names() -> list[str]:
    return [rule["alert"] for rule in yaml.safe_load(RULES.read_text())["groups"][0]["rules"]]


def case(series: dict[str, str], fires: str | None) -> dict[str, Any]:
    """Return a test of promtool: of all alerts only `fires` does after 55 minutes."""
    expected = [
        {"eval_time": "55m", "alertname": name, "exp_alerts": []} for name in names() if name != fires
    ]
    return {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "alert_rule_test": expected,
        "promql_expr_test": []
        if fires is None
        else [
            {
                "expr": f'count(ALERTS{{alertname="{fires}", alertstate="firing"}})',
                "eval_time": "55m",
                "exp_samples": [{"labels": "{}", "value": 1}],
            }
        ],
    }


def test_every_alert_fires_when_it_should_and_none_of_a_healthy_job(tmp_path: Path) -> None:
    assert "11 rules found" in run("promtool", "check", "rules", str(RULES))
    assert list(PROVOKED) == names()
    tests = [case(HEALTHY, None), case(STOPPED, None), case({}, "SparkAbsNoMetrics")]
    tests += [case(HEALTHY | series, name) for name, series in PROVOKED.items() if series]
    file = tmp_path / "tests.yml"
    file.write_text(yaml.safe_dump({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": tests}))
    run("promtool", "test", "rules", str(file))


def test_prometheus_finds_nothing_to_improve_in_the_metrics(tmp_path: Path) -> None:
    everything(job := SmallJob(tmp_path))
    assert run("promtool", "check", "metrics", given=Cli(job.root.uri)("metrics").stdout) == ""


@contextmanager
def prometheus(directory: Path, target: int) -> Iterator[str]:
    """Run Prometheus with the rules; yield its URL."""
    config = directory / "prometheus.yml"
    config.write_text(
        yaml.safe_dump(
            {
                "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
                "rule_files": [str(RULES)],
                "scrape_configs": [
                    {"job_name": "spark_abs", "static_configs": [{"targets": [f"127.0.0.1:{target}"]}]}
                ],
            }
        )
    )
    path, port = shutil.which("prometheus"), free_port()
    assert path, "prometheus is missing: apt-get install prometheus"
    address = f"127.0.0.1:{port}"
    options = {"config.file": config, "storage.tsdb.path": directory / "data", "web.listen-address": address}
    with (directory / "log").open("w") as log:
        server = subprocess.Popen([path, *(f"--{k}={v}" for k, v in options.items())], stderr=log)
        try:
            yield f"http://{address}/api/v1"
        finally:
            server.terminate()
            server.wait()


def asked(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=5) as answer:
        return json.load(answer)["data"]


def until(url: str, found: str) -> Any:
    """Ask again until the answer has a text."""
    for _ in range(120):
        try:
            answer = asked(url)
        except OSError:  # it begins to listen
            answer = None
        if found in json.dumps(answer):
            return answer
        time.sleep(0.5)
    raise AssertionError(f"no {found} at {url}: {answer}")


def test_prometheus_scrapes_a_root_and_an_alert_of_a_job_that_is_down_waits(tmp_path: Path) -> None:
    job = SmallJob(tmp_path)
    job.checkpoint(1)
    (tmp_path / "prometheus").mkdir()
    with (
        serving(job, Clock()) as server,
        prometheus(tmp_path / "prometheus", server.server_address[1]) as url,
    ):
        (alert,) = until(f"{url}/alerts", "SparkAbsJobDown")["alerts"]
        assert alert["state"] == "pending"
        assert alert["labels"]["job_name"] == "job"
        assert alert["annotations"]["summary"] == "No run of job job is alive"
        (series,) = asked(f"{url}/query?query=spark_abs_number_of_completed_checkpoints_total")["result"]
        assert (series["metric"]["job"], series["value"][1]) == ("spark_abs", "1")
        rules = [rule for group in asked(f"{url}/rules")["groups"] for rule in group["rules"]]
        assert {(rule["health"], rule.get("lastError")) for rule in rules} == {("ok", None)}


def test_the_dashboard_is_one_of_grafana() -> None:
    """Nothing is lost in its types, but the text that an older page of variables shows."""
    given = json.loads((GUIDE / "grafana-dashboard.json").read_text())
    read = json.loads(JSONEncoder().encode(Dashboard.from_json(given)))
    del given["templating"]["list"][1]["definition"]
    assert _lost(given, read) == []
    places = [tuple(panel["gridPos"].values()) for panel in given["panels"]]
    covered = [
        (column, line) for x, y, w, h in places for column in range(x, x + w) for line in range(y, y + h)
    ]
    assert len(covered) == len(set(covered)), "no panel lies on another"


def _lost(given: Any, read: Any, where: str = "") -> list[str]:
    if isinstance(given, dict) and isinstance(read, dict):
        return [each for key in given for each in _lost(given[key], read.get(key), f"{where}/{key}")]
    if isinstance(given, list) and isinstance(read, list) and len(given) == len(read):
        return [
            each
            for n, pair in enumerate(zip(given, read, strict=True))
            for each in _lost(*pair, f"{where}/{n}")
        ]
    return [] if given == read else [where]
