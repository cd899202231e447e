"""What is merged, when, and by whom; and what becomes of a merge that fails."""

from collections.abc import Sequence

import pyarrow as pa
from msgspec.structs import replace

from penstock.persist import Client
from penstock.persist.compact import distinct, summed
from penstock.persist.state import Batch, CollectionState


class Job:
    """Merges as a job elsewhere would, and remembers what it was asked for."""

    def __init__(self, client: Client) -> None:
        self._batches = client.reader.batches
        self.asked: list[int] = []

    def merge(
        self, collection: CollectionState, inputs: Sequence[Batch], staging: str, *, since: int
    ) -> Batch | None:
        self.asked.append(sum(batch.memory for batch in inputs))
        schema, newest = collection.schemas[-1], len(collection.schemas) - 1
        tables = [self._batches.rows(collection, batch, schema) for batch in inputs]
        updates = summed(pa.concat_tables(tables), schema.key, since=since)
        if updates.num_rows == 0:
            return None
        return replace(
            self._batches.build_stored(updates, newest, staging),
            merged=True,
            since=since,
            distinct=distinct(updates, schema.key, since=since),
        )
