"""Merging batches: same sum from since on, in fewer rows and fewer files.

A merge reads its inputs, brings times up to since, adds up equal rows, sorts
by key and writes one batch in the newest schema. Nobody can see that it
happened: not a snapshot as of since or later, and not a listener, whose times
lie at or past the since it holds and are never changed. It is never needed
for correctness, only to keep reading cheap.

Memory is bounded by `merge_bytes`, rewriting by the spine (`spine.py`).
"""

from collections.abc import Sequence

import pyarrow as pa

from penstock.data import advance, consolidate, sort_rows
from penstock.errors import InternalError
from penstock.persist.batch import Batches
from penstock.persist.settings import Settings
from penstock.persist.spine import next_merge
from penstock.persist.staging import Staging
from penstock.persist.state import Batch, CollectionState, Inline

__all__ = ["due", "merge", "merge_since", "mergeable"]


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


def due(collection: CollectionState, batches: Batches, settings: Settings) -> list[Batch]:
    """The batches to merge next, or none."""
    candidates = mergeable(collection, batches)
    chosen = next_merge([batch.rows for batch in candidates], fan_in=settings.fan_in)
    if chosen is None:
        # Small batches ride in every rollup; past some number of bytes they
        # are worth an object of their own.
        inline = [b for b in candidates if any(isinstance(part, Inline) for part in b.parts)]
        if sum(batch.size for batch in inline) <= 8 * settings.inline_bytes:
            return []
        if len(inline) == 1 and inline[0].merged:
            return []  # Many columns and few rows: it would come out as it went in.
        return inline
    inputs = candidates[chosen.start : chosen.stop]
    while len(inputs) > 1 and sum(batch.memory for batch in inputs) > settings.merge_bytes:
        inputs = inputs[1:]
    return inputs if len(inputs) > 1 else []


def merge(
    collection: CollectionState,
    inputs: Sequence[Batch],
    batches: Batches,
    staging: Staging,
    *,
    since: int,
) -> Batch | None:
    """One batch that sums to the same as `inputs` as of any time from `since` on."""
    compacted = max(batch.since for batch in inputs)
    if since < compacted:
        raise InternalError(
            f'merge of collection "{collection.name}" as of {since} got a batch compacted to '
            f"{compacted}"
        )
    schema = collection.schemas[-1]
    tables = [batches.rows(collection, batch, schema) for batch in inputs]
    updates = consolidate(advance(pa.concat_tables(tables), since))
    if updates.num_rows == 0:
        return None
    updates = sort_rows(updates, schema.key)
    newest = len(collection.schemas) - 1
    if batches.inline(updates):
        return batches.build_inline(updates, newest, since=since, merged=True)
    id = staging.acquire()
    try:
        return batches.build_stored(updates, newest, id, since=since, merged=True)
    except BaseException:
        staging.give_up(id)
        raise
