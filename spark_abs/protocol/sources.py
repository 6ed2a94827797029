"""Match the declared sources of a stage with its recorded sources, by name and never by position."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from spark_abs.manifest import CHANNEL, SourceShape, StageShape
from spark_abs.model import Position
from spark_abs.protocol.changes import StageProgress

_UNNAMED = "native"
"""The kind of a native source that an earlier version recorded without a name."""


def same_sources(then: Sequence[SourceShape], now: Sequence[SourceShape]) -> bool:
    """Say whether a stage reads the same sources in the same order: plans name sources by position."""
    places = match(then, now)
    return places == list(range(len(then))) and not any(unclear(then, now, places))


def recorded_sources(before: StageShape | None, reached: StageProgress) -> list[SourceShape]:
    """Name the sources of an offset file; a native source has no name if the shape does not record it."""
    known = before.sources if before is not None and len(before.sources) == len(reached.sources) else ()
    found = []
    for place, position in enumerate(reached.sources):
        if position is not None:
            found.append(SourceShape(CHANNEL, position.channel, position.feedback))
        else:
            found.append(known[place] if known else SourceShape(_UNNAMED, ""))
    return found


def match(names: Sequence[SourceShape], declared: Sequence[SourceShape]) -> list[int | None]:
    """Find the old position of each declared source; None for a new source.

    Native sources with equal names are matched by `at`, the rest in order. Sources that an earlier version
    recorded without names are matched in order if their number is the same.
    """
    free = dict(enumerate(names))
    found: list[int | None] = [None] * len(declared)
    unnamed = [place for place, source in free.items() if source.kind == _UNNAMED and not source.name]
    if unnamed:
        native = [i for i, s in enumerate(declared) if s.kind != CHANNEL]
        if len(native) == len(unnamed):
            for i, taken in zip(native, unnamed, strict=True):
                found[i] = taken
                del free[taken]
    for same_at in (True, False):
        for i, source in enumerate(declared):
            if found[i] is not None or (unnamed and source.kind != CHANNEL):
                continue
            place = next((p for p, s in free.items() if _known_as(s, source, same_at)), None)
            if place is not None:
                found[i] = place
                del free[place]
    return found


def _known_as(before: SourceShape, now: SourceShape, same_at: bool) -> bool:
    return (before.kind, before.name) == (now.kind, now.name) and (not same_at or before.at == now.at)


def unclear(
    names: Sequence[SourceShape], declared: Sequence[SourceShape], places: Sequence[int | None]
) -> Iterator[str]:
    """Iterate the reasons why native sources with equal names cannot be matched."""
    by_at = {p for p, now in zip(places, declared, strict=True) if p is not None and names[p].at == now.at}
    new = [now for p, now in zip(places, declared, strict=True) if p not in by_at]
    gone = [source for p, source in enumerate(names) if p not in by_at]
    for source in {(s.kind, s.name): s for s in new if s.kind not in (CHANNEL, _UNNAMED)}.values():
        was, now = ([s.at for s in group if s == source] for group in (gone, new))
        if was and max(len(was), len(now)) > 1 and (len(was) != len(now) or any(was)):
            yield (
                f"several of its sources are {source}, and the location of more than one changed "
                f"(was: {', '.join(was)}; now: {', '.join(now)}): it is unknown which position belongs to "
                "which source; change one of them at a time"
            )


def turned(shape: StageShape, reached: StageProgress, places: Sequence[int | None]) -> dict[int, Position]:
    """Return a stage's positions in channels that now close a loop and did not before, or the reverse."""
    found = {}
    for i, (source, place) in enumerate(zip(shape.sources, places, strict=True)):
        stands = None if place is None else reached.sources[place]
        if stands is not None and stands.feedback != source.feedback:
            found[i] = replace(stands, feedback=source.feedback)
    return found


def more_than_once(sources: Sequence[SourceShape]) -> SourceShape | None:
    """Return a native source that occurs several times in a stage's plan; None without one."""
    native = [(s, s.at) for s in sources if s.kind not in (CHANNEL, _UNNAMED)]
    return next((source for source, at in native if native.count((source, at)) > 1), None)
