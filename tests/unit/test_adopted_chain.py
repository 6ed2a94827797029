"""Whether queries with tables between them can be adopted together, from logs and checkpoints alone."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from deltalake import write_deltalake

from spark_abs.compatibility.adoption import Adoption, _same_plan, adopt
from spark_abs.compatibility.chain import why_not_aligned
from spark_abs.manifest import CHANNEL, SourceShape
from spark_abs.model import AttemptId, BatchId, ChannelId, StageId, dumps_position
from spark_abs.protocol.changes import first_position
from spark_abs.stages.native import NativeLog, check_native
from spark_abs.store.root import Root
from spark_abs.store.storage import Place
from spark_abs.store.table import Commit, Table

BRONZE, SILVER = StageId("bronze"), StageId("silver")


def _plan(batch: int, *lines: str) -> str:
    return "\n".join(["v1", json.dumps({"batchWatermarkMs": 0, "batchTimestampMs": batch}), *lines])


class Chain:
    """Query `bronze` writes a table, which query `silver` reads."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.table = Table.ensure(Place(str(base / "table")), pa.schema([("n", pa.int64())]))
        self.plan("bronze", 1, '{"logOffset":1}')
        self.finish("bronze", 1)

    def write(self) -> None:
        """Commit rows to the table."""
        write_deltalake(self.table.uri, pa.table({"n": pa.array([1], pa.int64())}), mode="append")
        self.table.refresh()

    def plan(self, query: str, batch: int, *lines: str) -> None:
        """Plan a batch."""
        at = self.base / query
        (at / "offsets").mkdir(parents=True, exist_ok=True)
        (at / "commits").mkdir(exist_ok=True)
        (at / "metadata").write_text(json.dumps({"id": f"query of {query}"}))
        (at / "offsets" / str(batch)).write_text(_plan(batch, *lines))

    def finish(self, query: str, batch: int) -> None:
        """Record the end of a batch."""
        (self.base / query / "commits" / str(batch)).write_text("v1\n{}")

    def offset(self, version: int, **others: Any) -> str:
        plain = {"reservoirId": self.table.id, "reservoirVersion": version, "index": -100}
        return json.dumps({"sourceVersion": 3, **plain, "isStartingVersion": False, **others})

    def reasons(
        self, *lines: str | None, adopted: bool = True, sinks: bool = True, back: bool = False
    ) -> str:
        """Return why silver cannot be adopted; it stands at these offsets."""
        job: Any = SimpleNamespace(
            stages={
                BRONZE: SimpleNamespace(adopt=str(self.base / "bronze") if adopted else None),
                SILVER: SimpleNamespace(adopt=str(self.base / "silver")),
            },
            sinks=[
                SimpleNamespace(
                    source=SimpleNamespace(stage=BRONZE, channel=ChannelId("bronze.main")),
                    table=self.table.uri if sinks else str(self.base / "none"),
                )
            ],
        )
        shapes = [SourceShape(CHANNEL, "bronze.main", back) for _ in lines]
        root, log = Root(str(self.base / "root")), NativeLog(Place(str(self.base / "silver")))
        return "; ".join(why_not_aligned(job, root, None, log, offsets=lines, streams=shapes))


@pytest.fixture
def chain(tmp_path: Path) -> Chain:
    chain = Chain(tmp_path)
    chain.write()
    chain.write()
    chain.plan("silver", 4, chain.offset(3))
    chain.finish("silver", 4)
    return chain


def test_a_reader_that_has_read_all_can_come_along(chain: Chain) -> None:
    """Commits without rows may follow, as the one that fences the writer does."""
    assert chain.reasons(chain.offset(3)) == ""
    chain.table.commit_next(Commit(transactions={"query of bronze": 5}))
    assert chain.reasons(chain.offset(3), chain.offset(3)) == ""
    assert chain.reasons(chain.offset(4)) == ""


def test_rows_that_were_not_read_are_named(chain: Chain) -> None:
    said = chain.reasons(chain.offset(2))
    assert "up to version 1, and version 2 has further rows, which a channel would not have" in said
    assert "`spark-abs rewind --checkpoints ... --tables ...`" in said
    chain.write()
    assert "up to version 2, and version 3 has" in chain.reasons(chain.offset(3))
    assert chain.reasons(chain.offset(4), chain.offset(3)) != ""


@pytest.mark.parametrize("part", [{"index": 0}, {"isStartingVersion": True}])
def test_a_version_that_was_read_in_part_is_refused(chain: Chain, part: dict[str, Any]) -> None:
    assert "has read a part of a version" in chain.reasons(chain.offset(2, **part))


def test_batches_under_way_are_refused(chain: Chain) -> None:
    """The table may have rows of the writer's batch, which the channel would get again."""
    chain.plan("bronze", 2, '{"logOffset":2}')
    said = chain.reasons(chain.offset(3))
    assert "the query of stage 'bronze' was killed in batch 2: the table may hold its rows" in said
    chain.finish("bronze", 2)
    chain.plan("silver", 5, chain.offset(3))
    assert "its query was killed in batch 5" in chain.reasons(chain.offset(3))


def test_what_the_declared_stages_lack_is_said(chain: Chain) -> None:
    assert "does not adopt the query that has written the table" in chain.reasons(
        chain.offset(3), adopted=False
    )
    assert f"with the id {chain.table.id}, and no sink writes bronze.main" in chain.reasons(
        chain.offset(3), sinks=False
    )
    assert "the Delta table with the id other" in chain.reasons(chain.offset(3, reservoirId="other"))
    assert "source 0 of its query reads no Delta table" in chain.reasons('{"logOffset":2}')
    assert "source 1 of its query reads no Delta table" in chain.reasons(chain.offset(3), None)
    assert "closes a loop" in chain.reasons(chain.offset(3), back=True)


def test_the_copy_begins_in_the_channel_and_has_the_id_of_the_query(chain: Chain, tmp_path: Path) -> None:
    """Other sources stay where they are; the old checkpoint is not changed."""
    chain.plan("silver", 4, '{"logOffset":7}', chain.offset(2))
    chain.plan("silver", 5, '{"logOffset":8}', chain.offset(3))
    chain.finish("silver", 5)
    root, old = Root(str(tmp_path / "root")), tmp_path / "silver"
    log = old / "sources" / "0" / "8"
    log.parent.mkdir(parents=True)
    for number in range(9):
        log.with_name(str(number)).write_text(f'v1\n{{"path":"file:///{number}","batchId":{number}}}')
    before = {path: path.read_bytes() for path in old.rglob("*") if path.is_file()}
    points: list[str] = []
    ctx: Any = SimpleNamespace(
        root=root,
        natives="native",
        attempt=AttemptId(1),
        start=lambda _, channel: first_position(channel),
        failpoint=points.append,
    )
    adoption = Adoption(
        SILVER,
        Place(str(old)),
        "query of silver",
        finished=BatchId(5),
        planned=BatchId(5),
        channels=(None, ChannelId("bronze.main")),
    )
    record = adopt(ctx, 2, adoption, lambda: None)
    copy = NativeLog(root.native("native", AttemptId(1), StageId(record.directory)))
    assert copy.query_id() == record.query == "query of silver"
    assert copy.idle_at() == 5
    assert copy.positions(BatchId(5)) == (first_position(ChannelId("bronze.main")),)
    assert copy.offsets(BatchId(5)).lines[0] == '{"logOffset":8}'
    assert copy.place.read("sources/0/8") is not None
    assert points == ["adopt.silver.copy.before", "adopt.silver.copy.after"]
    assert {path: path.read_bytes() for path in old.rglob("*") if path.is_file()} == before
    assert check_native(copy.place, BatchId(5)) is None


def test_a_copied_plan_is_the_same_but_for_its_channels() -> None:
    """With one offset a source, or one name a source."""
    delta, files = '{"reservoirId":"t"}', '{"logOffset":2}'
    gate = json.dumps(dumps_position(first_position(ChannelId("bronze.main"))))
    assert _same_plan(_plan(1, delta, files), _plan(1, gate, files))
    assert not _same_plan(_plan(1, delta, files), _plan(1, gate, '{"logOffset":3}'))
    assert not _same_plan(_plan(2, delta, files), _plan(1, gate, files))
    assert not _same_plan(_plan(1, files), None)
    assert _same_plan(None, None)
