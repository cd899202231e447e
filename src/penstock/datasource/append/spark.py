"""The writer of `df.write.format("penstock")`.

Spark creates the writer in one Python process, runs its tasks in others and commits in a
third. The writer lock is acquired in the first process and handed to the last, so no other
writer can append in between. The time of the rows, chosen before the first task, is therefore
still the next time at the commit.

If the driver dies, the lock remains; the next job detects the dead process and releases the
lock. If the response of a commit is lost, Spark reports a failed job whose rows may have been
written: read the collection before you write again.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Final

import pyarrow as pa
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from penstock.catalog import take_name_in_lake
from penstock.errors import Fenced, InternalError
from penstock.persist import Appended, LockHandoff, Settings, Staged, attach
from penstock.persist.append.shared_storage_check import place_marker, remove_marker
from penstock.persist.append.spark import arrow_schema, share_of
from penstock.persist.append.task import Share, Written, gathered
from penstock.persist.append.user_collections import (
    check_own,
    dropped_unless_written,
    open_for_job,
    own_collection,
    own_location,
    undo,
)

__all__ = ["CollectionWriter"]

SETTINGS: Final = Settings(patience_ms=60_000, background=False, notify="")


@dataclass
class _TaskCommit(WriterCommitMessage):
    written: Written


class CollectionWriter(DataSourceArrowWriter):
    """Writer that appends the rows of one job at one time."""

    def __init__(
        self,
        schema: StructType,
        *,
        location: str,
        collection: str,
        key: Sequence[str],
        patience_ms: int,
    ) -> None:
        url = own_location(location, collection, settings=SETTINGS)
        # The job belongs to the parent process: this process is about to end.
        client = open_for_job(url, patience_ms=patience_ms, settings=SETTINGS, pid=os.getppid())
        try:
            check_own(client, collection)
            target = own_collection(
                client,
                collection,
                arrow_schema(schema),
                key,
                take_name=partial(take_name_in_lake, client.url, collection),
            )
            self._collection = collection
            self._upper = target.upper
            self._time = max(SETTINGS.clock.now_ms(), self._upper)
            with client.staging() as staging:
                marker = place_marker(client.url, staging)
                self._share: Share = share_of(
                    schema, target, staging, time=self._time, marker=marker
                )
                self._baton: LockHandoff = client.hand_over(staging)
        except BaseException:
            client.close()
            raise

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Write the rows of one Spark task as objects under the staging id."""
        return _TaskCommit(self._share.write(iterator))

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Append the objects of all tasks, and release the lock."""
        results = [message.written for message in messages if isinstance(message, _TaskCommit)]
        with attach(self._baton, settings=SETTINGS) as client:
            target = client.collection(self._collection)
            with dropped_unless_written(client, target):
                rows = Staged(gathered(results))
                appended = target.compare_and_append(rows, self._upper, self._time + 1)
            if not isinstance(appended, Appended):
                raise InternalError(
                    f'upper of collection "{self._collection}" changed although the lock is held'
                )
        self._take_back()

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Release the lock, unless a failed commit did; the written objects are garbage."""
        with suppress(Fenced), attach(self._baton, settings=SETTINGS) as client:
            undo(client, self._collection)
        self._take_back()

    def _take_back(self) -> None:
        remove_marker(self._share.url, self._share.marker)
