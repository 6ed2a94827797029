"""The data of the page: small, and no text in it ends the element in which it stands."""

from __future__ import annotations

import json
import re

import pytest

from spark_abs.model import AttemptId, CheckpointId, StageId
from spark_abs.report.encoding import differences, embedded, plain_report
from spark_abs.report.model import CheckpointLine, Outcome, Report, StageLine, Timeline
from spark_abs.report.page import page_of
from spark_abs.report.redaction import LONGEST, redacted

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)> <!-- & ' \" \u2028 \ud800"


def report(name: str) -> Report:
    line = CheckpointLine(CheckpointId(1), Outcome.ABORTED, name=name, detail=name)
    part = StageLine(CheckpointId(1), StageId(name), acked=False, detail=name)
    return Report(
        name,
        name,
        1,
        version=name,
        attempt=AttemptId(1),
        restored_from=None,
        ready=True,
        timeline=Timeline((line,), (part,)),
        problems=(name,),
    )


def test_numbers_are_differences_and_gaps_stay() -> None:
    assert differences([100, 110, None, 130]) == [100, 10, None, 20]


def test_columns_without_anything_are_left_out_and_texts_are_there_once() -> None:
    plain = plain_report(report("a"))
    assert "size_full" not in plain["checkpoints"]
    assert plain["texts"].count("a") == 1
    assert plain["texts"][plain["checkpoints"]["detail"][0]] == "a"


def test_hostile_names_are_data_in_the_page_and_nothing_else() -> None:
    page = page_of(plain_report(report(HOSTILE)))
    page.encode()
    assert page.lower().count("<script") == 2
    assert page.lower().count("</script") == 2
    assert "<img" not in page
    data = re.search(r'<script type="application/json" id="report">(.*?)</script>', page, re.DOTALL)
    assert data is not None
    assert "\u2028" not in data[1]
    assert json.loads(data[1])["job"] == HOSTILE


def test_a_page_is_allowed_its_own_script_and_no_connection() -> None:
    plain = plain_report(report("a"))
    assert "connect-src &#x27;none&#x27;" in page_of(plain)
    assert "connect-src &#x27;self&#x27;" in page_of(plain, live_ms=2000)
    assert "unsafe" not in page_of(plain).split("</head>")[0]
    assert not re.search(r"""(?:src|href)=["']?https?:|@import|url\((?!#)""", page_of(plain))


def test_json_may_stand_in_an_element() -> None:
    assert embedded({"a": "<&>"}) == '{"a":"\\u003c\\u0026\\u003e"}'


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("jdbc: password=hunter2, user=me", "jdbc: password=***, user=me"),
        ('{"sasl.password": "a b", "x": 1}', '{"sasl.password": ***, "x": 1}'),
        ("s3://key:secret@bucket/path", "s3://***@bucket/path"),
        (
            "abfss://container@account.dfs.core.windows.net/x",
            "abfss://container@account.dfs.core.windows.net/x",
        ),
        ("https://h/x?sig=1&sas_token=abc&y=2", "https://h/x?sig=1&sas_token=***&y=2"),
        ("fs.s3a.access.key=AKIA fs.s3a.secret.key = zz", "fs.s3a.access.key=*** fs.s3a.secret.key = ***"),
        ("the password is wrong", "the password is wrong"),
        ("batch 7 at user@host", "batch 7 at user@host"),
    ],
)
def test_what_may_be_a_secret_is_stars(text: str, shown: str) -> None:
    assert redacted(text) == shown


def test_a_long_text_is_cut() -> None:
    assert len(redacted("x" * 10_000)) <= LONGEST + 2
