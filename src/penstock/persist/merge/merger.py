"""Merging batches: same sum from since on, in fewer rows and fewer files.

A merge reads its inputs, brings times up to since, adds up equal rows, sorts
by key and writes one batch in the newest schema. Nobody can see that it
happened: not a snapshot as of since or later, and not a listener, whose times
lie at or past the since it holds and are never changed. It is never needed
for correctness, only to keep reading cheap.

Memory is bounded by `merge_bytes`, beyond which a merge is a job for Spark if
there is one, and rewriting by the spine (`spine.py`).

Batches at or below since are folded into a *base*: one state, each row once,
which readers take as it is (`scan.py`).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Protocol

import pyarrow as pa
import pyarrow.compute as pc
from msgspec.structs import replace

from penstock.data import DIFF, TIME, advance, consolidate, negate, sort_rows
from penstock.errors import InternalError
from penstock.persist.batch import Batches
from penstock.persist.merge.spine import next_merge
from penstock.persist.settings import Settings
from penstock.persist.staging import Staging
from penstock.persist.state import Batch, CollectionState, Inline, stored_columns_of

__all__ = [
    "BigMerges",
    "LazyBigMerges",
    "Merger",
    "distinct",
    "merge_since",
    "mergeable",
    "settled",
    "summed",
]

FOLD_BYTES: Final = 4 << 20
"""A smaller base is not worth keeping apart."""

FOLD_SHARE: Final = 4


def mergeable(collection: CollectionState, batches: Batches) -> list[Batch]:
    """The batches that may be merged: wholly sealed, and readable through the newest schema."""
    newest = collection.schemas[-1]
    return [
        batch
        for batch in collection.batches
        if batch.upper <= collection.upper
        and (
            collection.schemas[batch.schema].codecs == newest.codecs
            or collection.id in batches.codecs
        )
    ]


def merge_since(collection: CollectionState) -> int:
    """To which time a merge may bring its rows up: since, but never past what is sealed.

    Since may stand past upper; rows brought there would count as not sealed.
    """
    return min(collection.since, max(collection.upper - 1, 0))


def settled(collection: CollectionState, batches: Batches) -> list[Batch]:
    """The mergeable batches that lie wholly at or below since: merged, they are one state.

    None while since has not moved.
    """
    since = merge_since(collection)
    return [batch for batch in mergeable(collection, batches) if batch.upper <= since + 1 > 1]


class BigMerges(Protocol):
    """Merges and compares what does not fit into the memory of one process."""

    def merge(
        self, collection: CollectionState, inputs: Sequence[Batch], staging: str, *, since: int
    ) -> Batch | None:
        """One stored batch under `staging` that sums to the same as `inputs` from `since` on."""
        ...

    def difference(
        self,
        collection: CollectionState,
        minus: Sequence[Batch],
        plus: Sequence[Batch],
        staging: str,
        *,
        time: int,
    ) -> Batch | None:
        """One stored batch, all of it at `time`, that with `minus` sums to what `plus` does."""
        ...


@dataclass(slots=True)
class LazyBigMerges:
    """Big merges by what `start` returns, which is called for the first of them.

    It is told of which collection they are, and how much memory they would take.
    """

    start: Callable[[str, int], BigMerges]
    _started: BigMerges | None = None

    def merge(
        self, collection: CollectionState, inputs: Sequence[Batch], staging: str, *, since: int
    ) -> Batch | None:
        """As `BigMerges` has it."""
        return self._to(collection, inputs).merge(collection, inputs, staging, since=since)

    def difference(
        self,
        collection: CollectionState,
        minus: Sequence[Batch],
        plus: Sequence[Batch],
        staging: str,
        *,
        time: int,
    ) -> Batch | None:
        """As `BigMerges` has it."""
        to = self._to(collection, [*minus, *plus])
        return to.difference(collection, minus, plus, staging, time=time)

    def _to(self, collection: CollectionState, inputs: Sequence[Batch]) -> BigMerges:
        if self._started is None:
            self._started = self.start(collection.name, _memory(inputs))
        return self._started


@dataclass(slots=True)
class Merger:
    """Chooses what to merge, and where: small merges here, big ones by a job if there is one."""

    batches: Batches
    staging: Staging
    settings: Settings
    big: BigMerges | None = None

    def due(self, collection: CollectionState) -> list[Batch]:
        """The batches to merge next, or none."""
        fold = self._fold(collection)
        if fold:
            return fold
        candidates = mergeable(collection, self.batches)
        chosen = next_merge([batch.rows for batch in candidates], fan_in=self.settings.fan_in)
        if chosen is None:
            # Small batches ride in every rollup; past some number of bytes they
            # are worth an object of their own.
            inline = [b for b in candidates if any(isinstance(part, Inline) for part in b.parts)]
            if sum(batch.size for batch in inline) <= 8 * self.settings.inline_bytes:
                return []
            if len(inline) == 1 and inline[0].merged:
                return []  # Many columns and few rows: it would come out as it went in.
            return inline
        inputs = candidates[chosen.start : chosen.stop]
        while len(inputs) > 1 and not self.possible(collection, inputs):
            inputs = inputs[1:]
        return inputs if len(inputs) > 1 else []

    def possible(self, collection: CollectionState, inputs: Sequence[Batch]) -> bool:
        """Whether there is a way to merge so much."""
        return not self._is_big(inputs) or self._has_job(collection, inputs)

    def merge(
        self, collection: CollectionState, inputs: Sequence[Batch], *, since: int
    ) -> Batch | None:
        """One batch that sums to the same as `inputs` as of any time from `since` on."""
        compacted = max(batch.since for batch in inputs)
        if since < compacted:
            raise InternalError(
                f'merge of collection "{collection.name}" as of {since} got a batch compacted to '
                f"{compacted}"
            )
        schema = collection.schemas[-1]
        if self.big is not None and self._is_big(inputs) and self._has_job(collection, inputs):
            with self._staged() as id:
                output = self.big.merge(collection, inputs, id, since=since)
            if output is None:
                self.staging.give_up(id)
            return output
        tables = [self.batches.rows(collection, batch, schema) for batch in inputs]
        updates = summed(pa.concat_tables(tables), schema.key, since=since)
        if updates.num_rows == 0:
            return None
        newest = len(collection.schemas) - 1
        if self.batches.inline(updates):
            output = self.batches.build_inline(updates, newest)
        else:
            with self._staged() as id:
                output = self.batches.build_stored(updates, newest, id)
        return replace(
            output, merged=True, since=since, distinct=distinct(updates, schema.key, since=since)
        )

    def difference(
        self,
        collection: CollectionState,
        minus: Sequence[Batch],
        plus: Sequence[Batch],
        staging: str,
        *,
        time: int,
    ) -> pa.Table | Batch | None:
        """What, at `time`, with `minus` sums to what `plus` does; in files if it was big."""
        inputs = [*minus, *plus]
        if self.big is not None and self._is_big(inputs) and self._has_job(collection, inputs):
            return self.big.difference(collection, minus, plus, staging, time=time)
        schema = collection.schemas[-1]
        tables = [negate(self.batches.rows(collection, batch, schema)) for batch in minus]
        tables += [self.batches.rows(collection, batch, schema) for batch in plus]
        tables.append(stored_columns_of(schema).empty_table())
        return summed(pa.concat_tables(tables), schema.key, since=time)

    def _fold(self, collection: CollectionState) -> list[Batch]:
        """What should go into the base, so that readers have little to add to it.

        The base is rewritten when what lies beside it has grown to a quarter of
        it: each update is then rewritten about five times in all.
        """
        ready = settled(collection, self.batches)
        base = max(ready, key=lambda batch: batch.rows, default=None)
        if base is None or base.memory < FOLD_BYTES or not self.possible(collection, ready):
            return []
        beside = sum(batch.rows for batch in ready) - base.rows
        return ready if not base.merged or FOLD_SHARE * beside >= base.rows else []

    def _is_big(self, inputs: Sequence[Batch]) -> bool:
        return _memory(inputs) > self.settings.merge_bytes

    def _has_job(self, collection: CollectionState, inputs: Sequence[Batch]) -> bool:
        """Whether a job can do it, which knows no codecs and so no two versions of one."""
        codecs = collection.schemas[-1].codecs
        return self.big is not None and all(
            collection.schemas[batch.schema].codecs == codecs for batch in inputs
        )

    @contextmanager
    def _staged(self) -> Iterator[str]:
        """A staging id for one batch, kept until the batch is linked or given up."""
        id = self.staging.acquire()
        try:
            yield id
        except BaseException:
            self.staging.give_up(id)
            raise


def _memory(batches: Sequence[Batch]) -> int:
    return sum(batch.memory for batch in batches)


def summed(updates: pa.Table, key: tuple[str, ...], *, since: int) -> pa.Table:
    """What `updates` come to from `since` on, in order of key."""
    updates = consolidate(advance(updates, since))
    return sort_rows(updates, key) if updates.num_rows else updates


def distinct(updates: pa.Table, key: tuple[str, ...], *, since: int) -> bool:
    """Whether the rows at `since`, already added up, are there once each, no two with one key."""
    rows = updates.filter(pc.equal(updates.column(TIME), since))
    if rows.num_rows == 0 or pc.min_max(rows.column(DIFF)).as_py() != {"min": 1, "max": 1}:
        return False
    if not key:
        return True
    columns = [rows.column(name) for name in key]
    names = [f"c{i}" for i in range(len(columns))]
    groups = pa.table(columns, names=names).group_by(names, use_threads=False).aggregate([])
    return bool(groups.num_rows == rows.num_rows)
