"""`spark-abs state`: the state of a stage at a checkpoint, as rows."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from spark_abs.cli.output import Output, text_of
from spark_abs.cli.root_command import Context, root_command
from spark_abs.errors import Refused, UsageError
from spark_abs.observe.state_at import StateAt, find_state, same_at
from spark_abs.store.root import Root
from spark_abs.store.storage import Place

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ROWS_SHOWN = 20


@click.command
@root_command
@click.argument("stage")
@click.option(
    "--checkpoint",
    metavar="ID|NAME|latest",
    default="latest",
    help="The checkpoint; by default the newest.",
)
@click.option("--operator", metavar="NUMBER|UID", help="The stateful operator, if there are several.")
@click.option("--store", metavar="NAME", help="The part of its state: left, right, a state variable, timers.")
@click.option("--diff", metavar="ID|NAME|latest", help="Show the differences from another checkpoint.")
@click.option("--export", metavar="TABLE", help="Write all rows to a new Delta table; show none.")
@click.option(
    "--limit", type=click.IntRange(min=1), metavar="N", help=f"Rows to show; {ROWS_SHOWN} if it is not given."
)
def state(
    ctx: Context,
    root: Root,
    *,
    stage: str,
    checkpoint: str,
    operator: str | None,
    store: str | None,
    diff: str | None,
    export: str | None,
    limit: int | None,
) -> None:
    """Show the state of a stage at a checkpoint: a row for each key. Starts Spark; the job is not touched."""
    if limit is not None and export is not None:
        raise UsageError(
            "--limit applies to rows that are shown, and --export shows none: give one of the two"
        )
    # What can be wrong about the call is found before a JVM is started.
    found = find_state(root, stage, checkpoint, operator, store)
    before = None if diff is None else same_at(root, found, diff)
    target = None if export is None else _target(root, export)
    with ctx.out.waiting(f"reading the state of stage {stage} at checkpoint {found.manifest.id}", told=False):
        from spark_abs.observe.state import state_frame

        frame = state_frame(_session(root, found, target), root, found, before)
        count = frame.count()
        if target is not None:
            frame.write.format("delta").mode("error").save(target.uri)
        rows = _rows(frame, limit or ROWS_SHOWN) if target is None else []
    shown = {
        "stage": stage,
        "checkpoint": found.manifest.id,
        "operator": found.operator.id,
        "diff": None if before is None else before.manifest.id,
        "count": count,
        "table": None if target is None else target.uri,
        "rows": rows,
    }
    ctx.out.result(shown, lambda out: _text(out, rows, frame.columns, count, target))


def _target(root: Root, export: str) -> Place:
    place = root.storage.place(export)
    if place.exists():
        raise Refused(f"there is something at {place} already: name a new place for the table")
    return place


def _session(root: Root, found: StateAt, target: Place | None) -> SparkSession:
    from spark_abs.spark.gateway import errors_kept
    from spark_abs.spark.session import apply_storage_conf, session_at

    uris = [] if target is None else [target.uri]
    quiet = {"spark.ui.enabled": "false"}
    with errors_kept():
        session = session_at(uris, f"state of {found.manifest.job}", **quiet)
    session.sparkContext.setLogLevel("ERROR")
    apply_storage_conf(session, root.storage, uris)
    return session


def _rows(frame: DataFrame, limit: int) -> list[dict[str, object]]:
    from pyspark.sql import functions as F

    one = F.to_json(F.struct(*frame.columns), {"ignoreNullFields": "false"})
    return [json.loads(row[0]) for row in frame.limit(limit).select(one).collect()]


def _text(
    out: Output, rows: list[dict[str, object]], columns: list[str], count: int, target: Place | None
) -> None:
    if target is not None:
        out.line(f"{count} rows written to {target}")
        return
    out.table([(name, False) for name in columns], ([_cell(row[name]) for name in columns] for row in rows))
    if len(rows) < count:
        out.say(f"{len(rows)} of {count} rows; --limit shows more, --export writes all")


def _cell(value: object) -> str:
    if isinstance(value, (dict, list)):
        return json.dumps(value, ensure_ascii=False, separators=(", ", ": "))
    return text_of(value)
