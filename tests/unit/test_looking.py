"""What a person sees who looks at the package and its objects in a notebook."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.types import StructType

import spark_abs
import spark_abs.cli.main
import spark_abs.state.functions
from spark_abs.job import Job


def test_the_package_lists_its_public_names_and_no_others() -> None:
    assert dir(spark_abs) == sorted(spark_abs.__all__)


def test_objects_say_in_one_line_what_they_are_and_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spark_abs.settings.session_settings", lambda _: {})
    session: Any = SparkSession.__new__(SparkSession)
    frame: Any = SimpleNamespace(isStreaming=True)
    keys: dict[str, Any] = {"access_key_id": "one-key", "secret_access_key": "its-secret"}
    job = Job("shop", root="s3://bucket/shop", spark=session, **keys)
    assert repr(job) == "Job('shop' at s3a://bucket/shop, stages none; sinks none)"
    orders = job.source("orders", frame)
    again = job.feedback("again", StructType().add("id", "long"))
    joined = job.stage("join", [orders, again], lambda *_: frame, outputs={"late": lambda _: frame})
    assert repr(again) == "Feedback('again' of job 'shop', not closed)"
    again.close(joined["late"])
    job.sink("joined", joined, table="s3://bucket/joined")
    assert [repr(each) for each in (job, orders, joined, joined["late"], again)] == [
        "Job('shop' at s3a://bucket/shop, stages orders, join; sinks joined)",
        "Stage('orders' of job 'shop', outputs main)",
        "Stage('join' of job 'shop', outputs main, late)",
        "Output('join.late' of job 'shop')",
        "Feedback('again' of job 'shop', closed by 'join.late')",
    ]
    assert "\n" not in repr(job.stages) + repr(job.sinks)
