"""`metrics`, read by Prometheus' own parser; what alert rules, dashboard and guide name of them."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from typing import Any

import pytest
import yaml

from spark_abs.errors import AbortReason
from spark_abs.observe.metrics import Sample, written
from spark_abs.store.activity import Disk, RunActivity, read_activity, write_activity
from tests.cli.conftest import Cli
from tests.cli.test_status import NOW, abort, tell
from tests.markdown_support import GUIDE, code_spans
from tests.root_support import SmallJob

STAGE_B = {"job_name": "job", "stage": "b"}


def parsed(text: str) -> dict[str, tuple[str, list[tuple[dict[str, str], float]]]]:
    """Return type and samples of each metric."""
    parser: Any = importlib.import_module("prometheus_client.parser")
    found = {}
    for family in parser.text_string_to_metric_families(text):
        samples = [(dict(sample.labels), float(sample.value)) for sample in family.samples]
        found[str(family.name)] = (str(family.type), samples)
    return found


def test_a_live_run_is_told_with_units_and_one_series_a_stage(job: SmallJob, cli: Cli) -> None:
    job.checkpoint(1)
    job.come_alive()
    abort(job, AbortReason.EXPIRED)
    tell(job)
    found = parsed(cli("metrics").stdout)
    assert found["spark_abs_up"] == ("gauge", [({"job_name": "job"}, 1.0)])
    assert found["spark_abs_number_of_completed_checkpoints"] == ("counter", [({"job_name": "job"}, 1.0)])
    assert found["spark_abs_number_of_failed_checkpoints"] == ("counter", [({"job_name": "job"}, 1.0)])
    assert found["spark_abs_failed_checkpoints_in_row"][1] == [({"job_name": "job"}, 1.0)]
    assert found["spark_abs_paused_sources"][1] == [({"job_name": "job"}, 0.0)]
    assert found["spark_abs_batch_under_way_seconds"][1] == [
        ({"job_name": "job", "stage": "a"}, 0.0),
        (STAGE_B, 11.0),
    ]
    assert found["spark_abs_lag_seconds"][1][1] == (STAGE_B, 30.0)
    assert found["spark_abs_watermark_lag_seconds"][1] == [(STAGE_B, 90.0)]
    assert found["spark_abs_unread_rows"][1] == [({**STAGE_B, "channel": "a.main"}, 5.0)]
    assert found["spark_abs_num_records_in_per_second"][1] == [(STAGE_B, 3.4)]


def test_a_job_that_does_not_run_is_down_and_has_no_series_of_stages_at_work(job: SmallJob, cli: Cli) -> None:
    found = parsed(cli("metrics").stdout)
    assert found["spark_abs_up"][1] == [({"job_name": "job"}, 0.0)]
    assert "spark_abs_last_checkpoint_age_seconds" not in found
    assert "spark_abs_lag_seconds" not in found


def test_disks_and_the_store_are_told(job: SmallJob, cli: Cli) -> None:
    job.checkpoint(1)
    job.come_alive()
    disk = Disk('/a "disk"\\', 5, 10, 5, NOW)
    activity = RunActivity(job.run, NOW, disks=(disk,), write_ms=250)
    write_activity(job.root, activity)
    found = parsed(cli("metrics").stdout)
    assert found["spark_abs_disk_free_bytes"][1] == [({"job_name": "job", "path": '/a "disk"\\'}, 5.0)]
    assert found["spark_abs_store_write_seconds"][1] == [({"job_name": "job"}, 0.25)]


def test_values_of_labels_are_escaped_and_large_numbers_are_whole() -> None:
    text = written([Sample("size_bytes", "Bytes", 123_456_789_012, (("job", 'a"b\n\\c'),))])
    assert parsed(text) == {"spark_abs_size_bytes": ("gauge", [({"job": 'a"b\n\\c'}, 123_456_789_012.0)])}


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((GUIDE / "prometheus-rules.yml").read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def dashboard() -> list[str]:
    """Return the expressions of the dashboard."""
    panels = json.loads((GUIDE / "grafana-dashboard.json").read_text(encoding="utf-8"))["panels"]
    return [target["expr"] for panel in panels for target in panel.get("targets", ())]


def selected(expression: str) -> set[str]:
    """Return the metrics of an expression, which a parser of Prometheus' language must understand."""
    promql: Any = importlib.import_module("promql_parser")
    nodes: list[Any] = []
    promql.walk(promql.parse(expression), nodes.append)
    return {node.name for node in nodes if isinstance(node, promql.VectorSelector)}


def everything(job: SmallJob) -> None:
    """Let a job be at work and tell all that can be known of it."""
    job.checkpoint(1)
    job.come_alive()
    tell(job)
    told = read_activity(job.root)
    assert told is not None
    stages = tuple(replace(stage, state_memory=5) for stage in told.stages)
    told = replace(told, stages=stages, disks=(Disk("/data", 5, 10, 5, NOW),), write_ms=250)
    write_activity(job.root, told)


@pytest.fixture
def printed(job: SmallJob, cli: Cli) -> set[str]:
    """Return the names of all metrics."""
    everything(job)
    return {line.partition("{")[0] for line in cli("metrics").stdout.splitlines() if line[0] != "#"}


def test_alerts_and_dashboard_name_metrics_that_there_are(printed: set[str]) -> None:
    alerts, panels = rules(), dashboard()
    assert len(alerts) > 5 < len(panels)
    for expression in (*(rule["expr"] for rule in alerts), *panels):
        named = selected(expression)
        assert named, expression
        assert named <= printed, expression
    assert set().union(*map(selected, panels)) | {"spark_abs_finished"} >= printed, "the dashboard shows all"


def test_the_guide_has_every_metric_and_no_other(printed: set[str]) -> None:
    page = GUIDE / "watching-a-job.md"
    assert {span for span in code_spans(page) if span.startswith("spark_abs_")} == printed


def test_a_metric_of_a_rule_that_nobody_prints_is_found() -> None:
    assert selected('increase(a_total{job_name=~"$job"}[10m]) > 2 unless b offset 5m') == {"a_total", "b"}
    with pytest.raises(ValueError, match="binary expression"):
        selected("a > b[5m]")
