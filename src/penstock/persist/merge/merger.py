"""Merges of batches: the same sum from since on, in fewer rows and fewer files.

A merge reads its inputs, advances times to since, consolidates equal rows, sorts by key and
writes one batch in the newest schema. No reader can observe a merge. A snapshot as of since
or later has the same contents. A listener reads only times at or past the since that it
holds, and these never change. Merges are not needed for correctness; they keep reads cheap.

Memory is bounded by `merge_bytes`. A larger merge is delegated to a Spark job, if one is
configured. The spine bounds the number of rewrites (`spine.py`).

Batches at or below since are merged into a *base*: one state with each row once, which
readers use without consolidation (`scan/plan.py`).
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
    "batches_below_since",
    "distinct",
    "merge_since",
    "mergeable",
    "summed",
]

FOLD_BYTES: Final = 4 << 20
"""Minimum size of a base, in bytes in memory; a smaller one is not worth a separate batch."""

FOLD_SHARE: Final = 4


def mergeable(collection: CollectionState, batches: Batches) -> list[Batch]:
    """Return the batches that may be merged: fully sealed and readable in the newest schema."""
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
    """Return the time to which a merge may advance rows: since, but below upper.

    Since may lie past upper. Rows advanced to it would count as not sealed.
    """
    return min(collection.since, max(collection.upper - 1, 0))


def batches_below_since(collection: CollectionState, batches: Batches) -> list[Batch]:
    """Return the mergeable batches that lie completely at or below since.

    Merged, they are one state. The list is empty before since first advances.
    """
    since = merge_since(collection)
    return [batch for batch in mergeable(collection, batches) if batch.upper <= since + 1 > 1]


class BigMerges(Protocol):
    """Executor of merges and comparisons that do not fit into the memory of one process."""

    def merge(
        self, collection: CollectionState, inputs: Sequence[Batch], staging: str, *, since: int
    ) -> Batch | None:
        """Return a stored batch under `staging` with the same sum as `inputs` from `since` on."""
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
        """Return a stored batch at `time` that, added to `minus`, sums to `plus`."""
        ...


@dataclass(slots=True)
class LazyBigMerges:
    """Executor of big merges that is started by the first of them.

    `start` gets the name of the collection and the memory of the merge in bytes.
    """

    start: Callable[[str, int], BigMerges]
    _started: BigMerges | None = None

    def merge(
        self, collection: CollectionState, inputs: Sequence[Batch], staging: str, *, since: int
    ) -> Batch | None:
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
        to = self._to(collection, [*minus, *plus])
        return to.difference(collection, minus, plus, staging, time=time)

    def _to(self, collection: CollectionState, inputs: Sequence[Batch]) -> BigMerges:
        if self._started is None:
            self._started = self.start(collection.name, _memory(inputs))
        return self._started


@dataclass(slots=True)
class Merger:
    """Choice and execution of merges: small ones in this process, big ones in a job."""

    batches: Batches
    staging: Staging
    settings: Settings
    big: BigMerges | None = None

    def due(self, collection: CollectionState) -> list[Batch]:
        """Return the batches to merge next; empty if no merge is due."""
        fold = self._fold(collection)
        if fold:
            return fold
        candidates = mergeable(collection, self.batches)
        chosen = next_merge([batch.rows for batch in candidates], fan_in=self.settings.fan_in)
        if chosen is None:
            # Every rollup contains the inline batches. Above this size, they are worth an
            # object.
            inline = [b for b in candidates if any(isinstance(part, Inline) for part in b.parts)]
            if sum(batch.size for batch in inline) <= 8 * self.settings.inline_bytes:
                return []
            if len(inline) == 1 and inline[0].merged:
                return []  # Many columns and few rows: the result would be the same batch.
            return inline
        inputs = candidates[chosen.start : chosen.stop]
        while len(inputs) > 1 and not self.possible(collection, inputs):
            inputs = inputs[1:]
        return inputs if len(inputs) > 1 else []

    def possible(self, collection: CollectionState, inputs: Sequence[Batch]) -> bool:
        """Return whether this process or a job can merge inputs of this size."""
        return not self._is_big(inputs) or self._has_job(collection, inputs)

    def merge(
        self, collection: CollectionState, inputs: Sequence[Batch], *, since: int
    ) -> Batch | None:
        """Return one batch with the same sum as `inputs` as of any time from `since` on."""
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
        """Return the updates at `time` that, added to `minus`, sum to `plus`; in files if big."""
        inputs = [*minus, *plus]
        if self.big is not None and self._is_big(inputs) and self._has_job(collection, inputs):
            return self.big.difference(collection, minus, plus, staging, time=time)
        schema = collection.schemas[-1]
        tables = [negate(self.batches.rows(collection, batch, schema)) for batch in minus]
        tables += [self.batches.rows(collection, batch, schema) for batch in plus]
        tables.append(stored_columns_of(schema).empty_table())
        return summed(pa.concat_tables(tables), schema.key, since=time)

    def _fold(self, collection: CollectionState) -> list[Batch]:
        """Return the batches to merge into the base, or none, so readers have few deltas to add.

        The base is rewritten when the batches next to it reach a quarter of its rows. Each
        update is then rewritten about five times in total.
        """
        ready = batches_below_since(collection, self.batches)
        base = max(ready, key=lambda batch: batch.rows, default=None)
        if base is None or base.memory < FOLD_BYTES or not self.possible(collection, ready):
            return []
        beside = sum(batch.rows for batch in ready) - base.rows
        return ready if not base.merged or FOLD_SHARE * beside >= base.rows else []

    def _is_big(self, inputs: Sequence[Batch]) -> bool:
        return _memory(inputs) > self.settings.merge_bytes

    def _has_job(self, collection: CollectionState, inputs: Sequence[Batch]) -> bool:
        """Return whether a job can merge the inputs: without codecs, it cannot convert versions."""
        codecs = collection.schemas[-1].codecs
        return self.big is not None and all(
            collection.schemas[batch.schema].codecs == codecs for batch in inputs
        )

    @contextmanager
    def _staged(self) -> Iterator[str]:
        """Yield a staging id for one batch, open until the batch is linked or dropped."""
        id = self.staging.acquire()
        try:
            yield id
        except BaseException:
            self.staging.give_up(id)
            raise


def _memory(batches: Sequence[Batch]) -> int:
    return sum(batch.memory for batch in batches)


def summed(updates: pa.Table, key: tuple[str, ...], *, since: int) -> pa.Table:
    """Return `updates` advanced to `since`, consolidated and sorted by key."""
    updates = consolidate(advance(updates, since))
    return sort_rows(updates, key) if updates.num_rows else updates


def distinct(updates: pa.Table, key: tuple[str, ...], *, since: int) -> bool:
    """Return whether the consolidated rows at `since` have multiplicity 1 and distinct keys.

    Without any row at `since`, return False.
    """
    rows = updates.filter(pc.equal(updates.column(TIME), since))
    if rows.num_rows == 0 or pc.min_max(rows.column(DIFF)).as_py() != {"min": 1, "max": 1}:
        return False
    if not key:
        return True
    columns = [rows.column(name) for name in key]
    names = [f"c{i}" for i in range(len(columns))]
    groups = pa.table(columns, names=names).group_by(names, use_threads=False).aggregate([])
    return bool(groups.num_rows == rows.num_rows)
