"""Checkpoints, restores and runs as OpenTelemetry traces, made from `history/`.

One trace for each checkpoint, with a span for each stage and each phase of it; one for each restore and for
each run that has ended. The ids are digests of the root and the number: the same event has the same ids
whenever and wherever it is sent, so that sending it again changes nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from spark_abs.store.history import HistoryEvent, HistoryRow

_MILLION = 1_000_000
_OK, _ERROR = 1, 2
"""Codes of a span's status."""
_INTERNAL = 1
"""The kind of a span that is no call from or to another program."""


@dataclass(frozen=True, slots=True)
class Span:
    """One span. Times in milliseconds since the epoch."""

    trace: str
    id: str
    name: str
    start_ms: int
    end_ms: int
    parent: str = ""
    failed: str = ""
    """The error; empty if it went well."""
    attributes: Mapping[str, str | int] = field(default_factory=dict)


def spans_of(root: str, rows: Sequence[HistoryRow]) -> tuple[Span, ...]:
    """Return the spans of all events that have come to an end, by time.

    Args:
        root: the identity of the root, see `ControlState.root`.
        rows: events of `history/`, by time.
    """
    found: list[Span] = []
    stages: dict[tuple[int, int], list[HistoryRow]] = {}
    started: dict[int, HistoryRow] = {}
    for row in rows:
        of = (int(row.run or 0), int(row.checkpoint or 0))
        match row.event:
            case HistoryEvent.STAGE_ACKED | HistoryEvent.STAGE_WAITING:
                stages.setdefault(of, []).append(row)
            case HistoryEvent.COMPLETED | HistoryEvent.ABORTED:
                found += _checkpoint(root, row, stages.pop(of, []))
            case HistoryEvent.RESTORED:
                found.append(_alone(root, "restore", row, row.at_ms - (row.duration_ms or 0)))
            case HistoryEvent.RUN_STARTED:
                started[int(row.run or 0)] = row
            case HistoryEvent.RUN_ENDED if int(row.run or 0) in started:
                found.append(_alone(root, "run", row, started.pop(int(row.run or 0)).at_ms))
            case _:
                pass
    return tuple(found)


def _checkpoint(root: str, row: HistoryRow, stages: Iterable[HistoryRow]) -> Iterator[Span]:
    trace = _id(32, root, "checkpoint", row.checkpoint)
    began = row.at_ms - (row.duration_ms or 0)
    failed = f"{row.reason}: {row.detail}" if row.event is HistoryEvent.ABORTED else ""
    kind = row.kind or "checkpoint"
    whole = Span(
        trace,
        _id(16, trace, "checkpoint"),
        f"{kind} {row.checkpoint}",
        began,
        row.at_ms,
        failed=failed,
        attributes=_attributes(row, "kind", "name", "mode", "attempt", "run", "size_full", "size_new"),
    )
    yield whole
    last: dict[str, HistoryRow] = {str(stage.stage): stage for stage in stages}
    for name, stage in last.items():
        yield from _stage(whole, name, stage)


def _stage(whole: Span, name: str, row: HistoryRow) -> Iterator[Span]:
    """Yield the part of a stage: it waits for the barrier, aligns, is blocked, and copies its state."""
    waits = row.event is HistoryEvent.STAGE_WAITING
    end = max(whole.start_ms, whole.start_ms + (row.duration_ms or 0))
    stage = Span(
        whole.trace,
        _id(16, whole.trace, name),
        f"stage {name}",
        whole.start_ms,
        end,
        parent=whole.id,
        failed=(row.detail or "no acknowledgement") if waits else "",
        attributes=_attributes(row, "stage", "size_full", "size_new", "alignment_bytes", "inflight_bytes"),
    )
    yield stage
    aligns = min(end, whole.start_ms + (row.start_delay_ms or 0))
    copies = max(aligns, end - (row.async_ms or 0))
    phases = [
        ("start delay", whole.start_ms, aligns),
        ("alignment", aligns, min(end, aligns + (row.alignment_ms or 0))),
    ]
    if not waits:
        phases.append(("blocked", max(whole.start_ms, copies - (row.sync_ms or 0)), copies))
        phases.append(("copy", copies, end))
    for phase, began, ended in phases:
        if ended > began:
            yield Span(stage.trace, _id(16, stage.trace, name, phase), phase, began, ended, parent=stage.id)


def _alone(root: str, what: str, row: HistoryRow, began: int) -> Span:
    number = row.attempt if what == "restore" else row.run
    trace = _id(32, root, what, number)
    how = (row.detail or "").strip().partition("\n")[0]
    failed = how if what == "run" and how.startswith("failed") else ""
    attributes = _attributes(row, "attempt", "run", "checkpoint", "name", "detail")
    return Span(
        trace,
        _id(16, trace, what),
        f"{what} {number}",
        began,
        row.at_ms,
        failed=failed,
        attributes=attributes,
    )


def _id(digits: int, *parts: object) -> str:
    text = "\0".join(map(str, parts))
    return hashlib.sha256(text.encode()).hexdigest()[:digits]


def _attributes(row: HistoryRow, *names: str) -> dict[str, str | int]:
    values = {name: getattr(row, name) for name in names}
    return {f"spark_abs.{name}": value for name, value in values.items() if value is not None}


def otlp(job: str, spans: Iterable[Span]) -> dict[str, Any]:
    """Return spans in the JSON form of OTLP, as a collector takes them at `/v1/traces`."""
    service = [_attribute("service.name", "spark_abs"), _attribute("spark_abs.job", job)]
    scope = {"scope": {"name": "spark_abs"}, "spans": [_otlp(span) for span in spans]}
    return {"resourceSpans": [{"resource": {"attributes": service}, "scopeSpans": [scope]}]}


def _otlp(span: Span) -> dict[str, Any]:
    status = {"code": _ERROR, "message": span.failed} if span.failed else {"code": _OK}
    return {
        "traceId": span.trace,
        "spanId": span.id,
        **({"parentSpanId": span.parent} if span.parent else {}),
        "name": span.name,
        "kind": _INTERNAL,
        "startTimeUnixNano": str(span.start_ms * _MILLION),
        "endTimeUnixNano": str(span.end_ms * _MILLION),
        "attributes": [_attribute(name, value) for name, value in span.attributes.items()],
        "status": status,
    }


def _attribute(key: str, value: str | int) -> dict[str, Any]:
    known = {"stringValue": value} if isinstance(value, str) else {"intValue": str(int(value))}
    return {"key": key, "value": known}
