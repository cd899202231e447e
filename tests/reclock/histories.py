"""Histories of bindings: rising frontiers of each source type, and the updates that mint makes."""

from dataclasses import dataclass
from itertools import accumulate as running_sums
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from hypothesis import strategies as st

from penstock.data import advance, consolidate
from penstock.data.remap_form import KAFKA, KAFKA_TOPICS, KINESIS, POSTGRES, PUBNUB, S3, RemapForm
from penstock.progress import SINGLE_PARTITION, Frontier
from penstock.reclock import Minted, accumulate, mint
from penstock.reclock.remap import encode_moves

FORMS = {form.name: form for form in (KAFKA, KAFKA_TOPICS, KINESIS, POSTGRES, PUBNUB, S3)}
PARTITIONS: dict[str, list[Any]] = {
    "kafka": [0, 1, 2],
    "kafka-topics": ["a-0", "a-1", "b-0"],
    "kinesis": ["shardId-000000000000", "shardId-000000000001", "x"],
    "postgres": [SINGLE_PARTITION],
    "pubnub": [1, 4, 7],
    "s3": ["a", "a/b", "ü"],
}
FIRST_SEQUENCE_NUMBER = 49661727849342039258072939847765243280241975881076047874


@dataclass(frozen=True)
class History:
    """Bound frontiers and the resulting updates of remap."""

    shape: RemapForm
    frontiers: dict[int, dict[Any, int]]
    """Frontier by time, in order of time."""

    updates: pa.Table
    upper: int

    def compact(self, since: int) -> "History":
        frontiers = {max(time, since): frontier for time, frontier in self.frontiers.items()}
        updates = consolidate(advance(self.updates, since))
        return History(self.shape, frontiers, updates, self.upper)

    def frontier_as_of(self, time: int) -> Frontier[Any]:
        return frontier_as_of(self.shape, self.updates, time)

    def time_of(self, partition: Any, offset: int) -> int | None:
        """Return the first time whose binding covers an event; None, if no binding does."""
        times = (time for time in self.frontiers if self.frontier_as_of(time)[partition] > offset)
        return next(times, None)


def frontier_as_of(shape: RemapForm, updates: pa.Table, time: int) -> Frontier[Any]:
    times = updates.column("mz_timestamp")
    return accumulate(shape, updates.filter(pc.less_equal(times, time)))


def make_history(
    shape: RemapForm, frontiers: dict[int, dict[Any, int]], upper: int | None = None
) -> History:
    """Mint `frontiers` one after the other. The default upper follows the last binding."""
    tables: list[pa.Table] = [encode_moves(shape, [], time=0)]
    current: Frontier[Any] = Frontier()
    for time, frontier in frontiers.items():
        match mint(shape, current, Frontier(frontier), time=time):
            case Minted(updates=updates, frontier=current):
                tables.append(updates)
    default_upper = max(frontiers, default=-1) + 1
    return History(
        shape, frontiers, pa.concat_tables(tables), default_upper if upper is None else upper
    )


@st.composite
def histories(pick: st.DrawFn, shapes: st.SearchStrategy[RemapForm] | None = None) -> History:
    shape = pick(shapes or st.sampled_from(list(FORMS.values())))
    partitions = PARTITIONS[shape.name]
    base = FIRST_SEQUENCE_NUMBER if shape == KINESIS else 0
    ticks = pick(st.integers(0, 5))
    times = list(
        running_sums(pick(st.lists(st.integers(1, 4), min_size=ticks, max_size=ticks)), initial=0)
    )[1:]
    frontiers: dict[int, dict[Any, int]] = {}
    current: dict[Any, int] = {}
    for time in times:
        for partition in pick(st.sets(st.sampled_from(partitions))):
            increment = pick(st.integers(0, 3))
            current[partition] = current.get(partition, base if increment else 0) + increment
        frontiers[time] = dict(current)
    idle = pick(st.integers(1, 3))
    return make_history(shape, frontiers, upper=(times[-1] if times else 0) + idle)
