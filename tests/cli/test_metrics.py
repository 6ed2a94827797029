"""`metrics`, read by Prometheus' own parser."""

from __future__ import annotations

import importlib
from typing import Any

from spark_abs.errors import AbortReason
from spark_abs.observe.metrics import Sample, written
from spark_abs.store.activity import Disk, RunActivity, write_activity
from tests.cli.conftest import Cli
from tests.cli.test_status import NOW, abort, tell
from tests.root_support import SmallJob

STAGE_B = {"job": "job", "stage": "b"}


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
    assert found["spark_abs_up"] == ("gauge", [({"job": "job"}, 1.0)])
    assert found["spark_abs_number_of_completed_checkpoints"] == ("counter", [({"job": "job"}, 1.0)])
    assert found["spark_abs_number_of_failed_checkpoints"] == ("counter", [({"job": "job"}, 1.0)])
    assert found["spark_abs_failed_checkpoints_in_row"][1] == [({"job": "job"}, 1.0)]
    assert found["spark_abs_batch_under_way_seconds"][1] == [
        ({"job": "job", "stage": "a"}, 0.0),
        (STAGE_B, 11.0),
    ]
    assert found["spark_abs_lag_seconds"][1][1] == (STAGE_B, 30.0)
    assert found["spark_abs_watermark_lag_seconds"][1] == [(STAGE_B, 90.0)]
    assert found["spark_abs_unread_rows"][1] == [({**STAGE_B, "channel": "a.main"}, 5.0)]
    assert found["spark_abs_num_records_in_per_second"][1] == [(STAGE_B, 3.4)]


def test_a_job_that_does_not_run_is_down_and_has_no_series_of_stages_at_work(job: SmallJob, cli: Cli) -> None:
    found = parsed(cli("metrics").stdout)
    assert found["spark_abs_up"][1] == [({"job": "job"}, 0.0)]
    assert "spark_abs_last_checkpoint_age_seconds" not in found
    assert "spark_abs_lag_seconds" not in found


def test_disks_and_the_store_are_told(job: SmallJob, cli: Cli) -> None:
    job.checkpoint(1)
    job.come_alive()
    disk = Disk('/a "disk"\\', 5, 10, 5, NOW)
    activity = RunActivity(job.run, NOW, disks=(disk,), write_ms=250)
    write_activity(job.root, activity)
    found = parsed(cli("metrics").stdout)
    assert found["spark_abs_disk_free_bytes"][1] == [({"job": "job", "path": '/a "disk"\\'}, 5.0)]
    assert found["spark_abs_store_write_seconds"][1] == [({"job": "job"}, 0.25)]


def test_values_of_labels_are_escaped_and_large_numbers_are_whole() -> None:
    text = written([Sample("size_bytes", "Bytes", 123_456_789_012, (("job", 'a"b\n\\c'),))])
    assert parsed(text) == {"spark_abs_size_bytes": ("gauge", [({"job": 'a"b\n\\c'}, 123_456_789_012.0)])}
