"""Events of `history/` as traces: the same ids each time, spans inside of their parents."""

from __future__ import annotations

from typing import Any

from spark_abs.model import AttemptId, CheckpointId, RunId, StageId
from spark_abs.observe.traces import Span, otlp, spans_of
from spark_abs.store.history import HistoryEvent, HistoryRow

T = 1_700_000_000_000


def row(at: int, event: HistoryEvent, number: int | None = 7, **columns: Any) -> HistoryRow:
    checkpoint = None if number is None else CheckpointId(number)
    return HistoryRow(T + at, event, AttemptId(1), RunId(2), checkpoint, **columns)


ACKED = row(
    900,
    HistoryEvent.STAGE_ACKED,
    stage=StageId("match"),
    duration_ms=900,
    start_delay_ms=100,
    alignment_ms=300,
    sync_ms=50,
    async_ms=400,
    size_new=10,
)
COMPLETED = row(1_000, HistoryEvent.COMPLETED, kind="savepoint", name="mine", duration_ms=1_000, size_full=20)


def by_name(spans: tuple[Span, ...]) -> dict[str, Span]:
    return {span.name: span for span in spans}


def test_a_checkpoint_is_one_trace_with_a_span_for_each_stage_and_phase() -> None:
    found = by_name(spans_of("root", [row(0, HistoryEvent.TRIGGERED), ACKED, COMPLETED]))
    at = {name: (span.start_ms - T, span.end_ms - T) for name, span in found.items()}
    assert at == {
        "savepoint 7": (0, 1_000),
        "stage match": (0, 900),
        "start delay": (0, 100),
        "alignment": (100, 400),
        "blocked": (450, 500),
        "copy": (500, 900),
    }
    assert len({span.trace for span in found.values()}) == 1
    assert len({span.id for span in found.values()}) == len(found)
    assert found["copy"].parent == found["stage match"].id
    assert found["stage match"].parent == found["savepoint 7"].id
    assert found["savepoint 7"].attributes["spark_abs.size_full"] == 20


def test_ids_are_the_same_each_time_and_other_ones_in_another_root() -> None:
    rows = [ACKED, COMPLETED]
    first, again, other = (spans_of(root, rows) for root in ("root", "root", "other"))
    assert first == again
    assert not {span.trace for span in first} & {span.trace for span in other}
    assert not {span.id for span in first} & {span.id for span in other}


def test_an_aborted_checkpoint_is_an_error_and_so_is_the_stage_without_acknowledgement() -> None:
    waiting = row(
        3_000, HistoryEvent.STAGE_WAITING, stage=StageId("tell"), duration_ms=3_000, start_delay_ms=3_000,
        detail="batch 7 has been under way for 11.0 s",
    )  # fmt: skip
    aborted = row(3_001, HistoryEvent.ABORTED, reason="expired", detail="after 3000 ms", duration_ms=3_001)
    found = by_name(spans_of("root", [ACKED, waiting, aborted]))
    assert found["checkpoint 7"].failed == "expired: after 3000 ms"
    assert found["stage tell"].failed == "batch 7 has been under way for 11.0 s"
    assert found["stage match"].failed == ""


def test_every_span_is_inside_of_its_parent_whatever_the_figures_are() -> None:
    wild = row(
        100, HistoryEvent.STAGE_ACKED, stage=StageId("a"), duration_ms=100,
        start_delay_ms=900, alignment_ms=900, sync_ms=900, async_ms=900,
    )  # fmt: skip
    spans = spans_of("root", [wild, row(100, HistoryEvent.COMPLETED, duration_ms=100)])
    known = {span.id: span for span in spans}
    for span in spans:
        assert span.start_ms <= span.end_ms
        if span.parent:
            above = known[span.parent]
            assert above.start_ms <= span.start_ms <= span.end_ms <= above.end_ms


def test_restores_and_ended_runs_are_traces_of_their_own_and_open_ones_are_not_sent() -> None:
    rows = [
        row(0, HistoryEvent.RUN_STARTED, None),
        row(10, HistoryEvent.TRIGGERED),
        row(50, HistoryEvent.RUN_ENDED, None, detail="failed: stage 'a'\nTraceback"),
        row(90, HistoryEvent.RESTORED, 7, duration_ms=30, detail="from attempt 0"),
    ]
    found = by_name(spans_of("root", rows))
    assert {name: (s.start_ms - T, s.end_ms - T) for name, s in found.items()} == {
        "run 2": (0, 50),
        "restore 1": (60, 90),
    }
    assert (found["run 2"].failed, found["restore 1"].failed) == ("failed: stage 'a'", "")


def test_the_form_of_otlp() -> None:
    plain = otlp("shop", spans_of("root", [ACKED, COMPLETED]))
    (resource,) = plain["resourceSpans"]
    assert {"key": "service.name", "value": {"stringValue": "spark_abs"}} in resource["resource"][
        "attributes"
    ]
    whole, stage, *_ = resource["scopeSpans"][0]["spans"]
    assert (len(whole["traceId"]), len(whole["spanId"]), "parentSpanId" in whole) == (32, 16, False)
    assert whole["startTimeUnixNano"] == str(T * 1_000_000)
    assert {"key": "spark_abs.size_full", "value": {"intValue": "20"}} in whole["attributes"]
    assert (whole["status"], stage["parentSpanId"]) == ({"code": 1}, whole["spanId"])
