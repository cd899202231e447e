"""Sources that never were: frontiers that rise, of each shape, as bindings make them."""

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import pyarrow as pa
from hypothesis import strategies as st

from penstock.data import advance, consolidate
from penstock.progress import MAX_TIME
from penstock.reclock import (
    KINESIS,
    SHAPES,
    WHOLE,
    Bindings,
    Closing,
    Minted,
    Shape,
    close,
    mint,
)
from penstock.reclock.remap import encoded

PARTITIONS: dict[str, list[Any]] = {
    "kafka": [0, 1, 2],
    "kafka-topics": ["a-0", "a-1", "b-0"],
    "kinesis": ["shardId-000000000000", "shardId-000000000001", "x"],
    "postgres": [WHOLE],
    "pubnub": [1, 4, 7],
    "s3": ["a", "a/b", "ü"],
}
FIRST_SEQUENCE_NUMBER = 49661727849342039258072939847765243280241975881076047874


@dataclass(frozen=True)
class History:
    """What was bound when, and the updates that minting made of it."""

    shape: Shape
    frontiers: dict[int, dict[Any, int]]
    """By time; in order."""

    updates: pa.Table
    upper: int

    def bindings(self, since: int = 0) -> Bindings:
        compacted = consolidate(advance(self.updates, since))
        return Bindings.read(self.shape, compacted, since=since, upper=self.upper, source="s")


def written(shape: Shape, frontiers: dict[int, dict[Any, int]], upper: int | None = None) -> Any:
    """What minting `frontiers` one after the other makes of them; upper None closes at once."""
    tables, current = [encoded(shape, [], at=0)], {}
    for time, frontier in frontiers.items():
        match mint(shape, current, frontier, at=time):
            case Minted(updates=updates, frontier=current):
                tables.append(updates)
    return History(
        shape,
        frontiers,
        pa.concat_tables(tables),
        MAX_TIME if upper is None else upper,
    )


@st.composite
def histories(draw: st.DrawFn, shapes: st.SearchStrategy[Shape] | None = None) -> History:
    shape = draw(shapes or st.sampled_from(list(SHAPES.values())))
    partitions = PARTITIONS[shape.name]
    base = FIRST_SEQUENCE_NUMBER if shape == KINESIS else 0
    ticks = draw(st.integers(0, 5))
    times = list(
        accumulate(draw(st.lists(st.integers(1, 4), min_size=ticks, max_size=ticks)), initial=0)
    )[1:]
    frontiers: dict[int, dict[Any, int]] = {}
    current: dict[Any, int] = {}
    for time in times:
        for partition in draw(st.sets(st.sampled_from(partitions))):
            more = draw(st.integers(0, 3))
            current[partition] = current.get(partition, base if more else 0) + more
        frontiers[time] = dict(current)
    idle = draw(st.integers(1, 3))
    return written(shape, frontiers, upper=(times[-1] if times else 0) + idle)


def closed(history: History, at: int) -> History:
    """The same, closed at a time past its upper."""
    last = list(history.frontiers.values())[-1] if history.frontiers else {}
    closing = close(history.shape, last, at=at)
    assert isinstance(closing, Closing)
    updates = pa.concat_tables([history.updates, closing.updates])
    return History(history.shape, history.frontiers, updates, MAX_TIME)
