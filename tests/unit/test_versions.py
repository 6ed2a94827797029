"""What differs between versions of Spark, without a session."""

from __future__ import annotations

import pytest

import spark_abs
from spark_abs.errors import Refused, UsageError
from spark_abs.spark import versions
from spark_abs.spark.versions import canonical_sql, release_of, require_state_rewriter, require_supported


@pytest.mark.parametrize("found", ["3.5.8", "4.3.0", "40.1.0"])
def test_a_spark_that_is_not_supported_is_refused_with_those_that_are(found: str) -> None:
    with pytest.raises(UsageError, match=rf"runs on Spark 4\.0, 4\.1 and 4\.2, .* pyspark {found}: install"):
        require_supported(found)


@pytest.mark.parametrize("found", ["4.0.0", "4.1.4", "4.2.1"])
def test_every_release_of_a_supported_line_is_taken(found: str) -> None:
    require_supported(found)


def test_a_platform_may_add_to_a_release() -> None:
    assert [release_of(v) for v in ("4.1.0-amzn-1", "4.2.0", "4.2.0.dev0")] == ["4.1.0", "4.2.0", "4.2.0"]


@pytest.mark.parametrize(
    ("older", "newest"),
    [
        (
            "sum(CAST(raise_error('USER_RAISED_EXCEPTION', map('errorMessage', concat('a(', s))) AS BIGINT))",
            "sum(CAST(raise_error(concat('a(', s)) AS BIGINT))",
        ),
        (
            r"raise_error('USER_RAISED_EXCEPTION', map('errorMessage', concat(`a)`, '\')', 'b''c'))) = 'x)'",
            r"raise_error(concat(`a)`, '\')', 'b''c')) = 'x)'",
        ),
        (
            "f(raise_error('USER_RAISED_EXCEPTION', map('errorMessage', g(raise_error("
            "'USER_RAISED_EXCEPTION', map('errorMessage', 'b'))))))",
            "f(raise_error(g(raise_error('b'))))",
        ),
        # Of an error with another condition the parameters count.
        ("raise_error('OTHER', map('errorMessage', s))", "raise_error('OTHER', map('errorMessage', s))"),
    ],
)
def test_sql_of_an_older_spark_is_written_as_the_newest_writes_it(older: str, newest: str) -> None:
    assert canonical_sql(older) == newest
    assert canonical_sql(newest) == newest


def test_state_is_not_written_anew_by_a_spark_that_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "rewrites_state", lambda: False)
    with pytest.raises(Refused, match=r"an edit needs Spark 4\.2, .* has pyspark .*Nothing was changed"):
        require_state_rewriter("an edit")


def test_a_job_without_a_session_says_so() -> None:
    with pytest.raises(UsageError, match=r"job 'x' needs a session: give spark=spark_abs.spark_session"):
        spark_abs.Job("x", root="/r", spark=None)  # type: ignore[arg-type]
