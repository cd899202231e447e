"""Spark functions of Penstock: read, append and compact collections.

    import penstock.spark as ps

    orders = ps.read(spark, "file:./data", "shop.public.orders")

A read returns a DataFrame over the stored files, as of one time. It holds these files until no plan
refers to them.
"""

from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from importlib.util import find_spec
from typing import Final
from urllib.parse import unquote

from pyspark.sql import DataFrame, SparkSession

from penstock import persist
from penstock.catalog import take_name_in_lake
from penstock.data.spark_types import to_spark
from penstock.datasource.spark import register
from penstock.engine.dataframe_lifetime.spark import call_when_unused, explain_failures
from penstock.engine.spark import connect, session
from penstock.engine.storage_access.spark import find_native_root
from penstock.errors import Corruption, InternalError, UsageError
from penstock.ingest import find_progress_view
from penstock.persist import Appended, Client, Settings
from penstock.persist.append.spark import arrow_schema, stage
from penstock.persist.append.user_collections import (
    check_own,
    dropped_unless_written,
    open_for_job,
    own_collection,
    own_location,
)
from penstock.persist.errors import NotYetComplete, SinceError
from penstock.persist.input_validation import check_as_of, check_frontier
from penstock.persist.lake import find_collection, time_of
from penstock.persist.merge.merger import BigMerges
from penstock.persist.merge.spark import SparkMerges
from penstock.persist.scan.plan import scan_changes, scan_snapshot
from penstock.persist.scan.spark import Scanner
from penstock.persist.scan_holds import ScanHold, ScanHolds
from penstock.persist.state import CollectionState

__all__ = ["append", "changes", "compactor", "read", "read_all", "register", "session"]

SETTINGS: Final = Settings(patience_ms=60_000)
"""Settings of interactive reads: an unavailable store is an error after a minute."""

READINGS: Final = ScanHolds(SETTINGS)


def read(
    spark: SparkSession,
    location: str,
    collection: str,
    as_of: int | str | datetime | None = None,
    *,
    hold: bool = True,
) -> DataFrame:
    """Return the rows of a collection as of a time, repeated by multiplicity.

    The time is in milliseconds since the epoch, an aware `datetime`, or a text as on the command
    line. The default is the latest complete time. `hold=False` writes nothing to the location, but
    then compaction may delete files that the query needs.

    Raises:
        SinceError: the time is below since.
        NotYetComplete: the time is at or past upper.
        CollectionErrored: the collection is in error as of the time.
    """
    return read_all(spark, location, [collection], as_of, hold=hold)[collection]


def read_all(
    spark: SparkSession,
    location: str,
    collections: Sequence[str],
    as_of: int | str | datetime | None = None,
    *,
    hold: bool = True,
) -> dict[str, DataFrame]:
    """Return several collections as of one common time, for consistent joins.

    The default is the latest time that is complete in all of them. See `read`.
    """
    if not collections:
        raise UsageError("read_all was given no collection", hint="Name at least one.")
    members = _find_all(location, collections, as_of)
    at = _common_time(members, as_of)
    while True:
        try:
            return _read_all(spark, location, members, at, hold)
        except SinceError:
            # Since advanced before the hold was taken; "earliest" then means a later time.
            before, members = at, _find_all(location, collections, as_of)
            at = _common_time(members, as_of)
            if at == before:
                raise


def _read_all(
    spark: SparkSession, location: str, members: Sequence["_NamedCollection"], at: int, hold: bool
) -> dict[str, DataFrame]:
    frames: dict[str, DataFrame] = {}
    for member in members:
        if member.bindings is not None:
            frames[member.bindings] = _bindings(spark, location, member.bindings, hold, as_of=at)
            continue
        read_from = member.as_of(at)
        with _reading(read_from, at, hold=hold) as begun:
            state = begun.reading.claim.state.collections[read_from.collection.id]
            scanner = _scanner(spark, member.url, begun.reading)
            frame = scanner.contents(scan_snapshot(state, at))
            begun.until_unused(scanner.scans)
        frames[member.collection.name] = frame
    return frames


def changes(
    spark: SparkSession,
    location: str,
    collection: str,
    lower: int | str | datetime,
    upper: int | str | datetime,
    *,
    hold: bool = True,
) -> DataFrame:
    """Return the updates with times in `[lower, upper)`, with `mz_timestamp` and `mz_diff`.

    The updates are not consolidated: a row may have several updates at one time, whose diffs add
    up.

    Raises:
        SinceError: `lower` is not past since; up to since, times are not distinguished.
        NotYetComplete: `upper` is past the upper of the collection.
        CollectionErrored: the collection is in error at a time of the interval.
    """
    member = _find(location, collection)
    interval = _interval(lower, upper, member.collection)
    while True:
        try:
            return _changes(spark, location, member, interval, hold)
        except SinceError:
            before, member = interval, _find(location, collection)
            interval = _interval(lower, upper, member.collection)
            if interval[0] == before[0]:
                raise


def _changes(
    spark: SparkSession,
    location: str,
    member: "_NamedCollection",
    interval: tuple[int, int],
    hold: bool,
) -> DataFrame:
    first, beyond = interval
    if member.bindings is not None:
        return _bindings(spark, location, member.bindings, hold, interval=interval)
    member = member.as_of(first)
    with _reading(member, max(first - 1, 0), hold=hold) as begun:
        state = begun.reading.claim.state.collections[member.collection.id]
        scanner = _scanner(spark, member.url, begun.reading)
        frame = scanner.changes(scan_changes(state, first, beyond))
        begun.until_unused(scanner.scans)
    return frame


def append(
    frame: DataFrame,
    location: str,
    collection: str,
    *,
    key: Sequence[str] = (),
    patience_ms: int = 600_000,
) -> int:
    """Append the rows of `frame` to a user collection, atomically at one time, and return it.

    The collection is created if it does not exist, with the columns of the frame and `key`. The
    returned time is the current time, or the next time of the collection if that is later. The call
    waits up to `patience_ms` for another job that writes in the same storage location.

    Raises:
        UsageError: the rows do not fit the collection, or it is not a user collection.
        LockHeld: another writer did not finish in time.
    """
    url = own_location(location, collection, settings=SETTINGS)
    with open_for_job(url, patience_ms=patience_ms, settings=SETTINGS) as client:
        find_native_root(frame.sparkSession, url)
        check_own(client, collection)
        target = own_collection(
            client,
            collection,
            arrow_schema(frame.schema),
            key,
            take_name=partial(take_name_in_lake, client.url, collection),
        )
        upper = target.upper
        at = max(SETTINGS.clock.now_ms(), upper)
        with dropped_unless_written(client, target), client.staging() as staging:
            rows = stage(frame, target, staging, time=at)
            appended = target.compare_and_append(rows, upper, at + 1)
        if not isinstance(appended, Appended):
            raise InternalError(f'upper of collection "{collection}" moved under our lock')
    return at


def compactor(spark: SparkSession, client: Client) -> BigMerges:
    """Return an executor for merges that are too big for one process, as jobs of `spark`.

        client.delegate_big_merges(ps.compactor(spark, client))

    Raises:
        UsageError: Spark's tasks cannot reach the location.
    """
    find_native_root(spark, client.url)
    part_bytes = client.reader.settings.part_bytes
    return SparkMerges(spark, client.url, part_bytes=part_bytes)


@dataclass(frozen=True, slots=True)
class _NamedCollection:
    url: str
    collection: CollectionState
    bindings: str | None = None
    """Name of a progress or remap relation; then `collection` is its remap collection."""

    earliest: int = 0
    """First time with rows; computed only if requested."""

    older: tuple[CollectionState, ...] = ()
    """Earlier collections of the same name, oldest first."""

    def as_of(self, time: int) -> "_NamedCollection":
        """Return the collection that the name refers to as of a time."""
        older = next((collection for collection in self.older if time < collection.upper), None)
        return self if older is None else _NamedCollection(self.url, older)


class _reading:  # noqa: N801 - used as a function.
    """Hold of a read that ends with the block, unless scans have taken it over."""

    def __init__(self, member: _NamedCollection, since: int, *, hold: bool) -> None:
        self._stack = ExitStack()
        self._url, self._hold = member.url, hold
        self.reading: ScanHold = READINGS.begin(
            member.url, member.collection.id, member.collection.name, since, hold=hold
        )
        self._stack.callback(self.reading.release)

    def __enter__(self) -> "_reading":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._stack.close()
        if isinstance(error, Corruption):
            away = _compacted_away(self._url, error.key, held=self._hold)
            if away is not None:
                raise away from error

    def until_unused(self, scans: Sequence[DataFrame]) -> None:
        call_when_unused(scans, self._stack.pop_all().close)


def _find_all(
    location: str, collections: Sequence[str], as_of: int | str | datetime | None
) -> list["_NamedCollection"]:
    earliest = as_of == "earliest"
    return [_find(location, name, earliest=earliest) for name in dict.fromkeys(collections)]


def _find(location: str, name: str, *, earliest: bool = False) -> _NamedCollection:
    bindings = find_progress_view(location, name, hold=False, settings=SETTINGS)
    if bindings is not None:
        with closing(bindings[0]):
            state = bindings[1].remap.state
            time = bindings[1].time_of("earliest") if earliest else state.since
            return _NamedCollection(bindings[0].url, state, name, time)
    client, _ = find_collection(location, name, hold=False, settings=SETTINGS)
    with closing(client):
        generations = client.state.generations(name)
        *older, current = generations
        return _NamedCollection(
            client.url, current, earliest=generations[0].since, older=tuple(older)
        )


def _bindings(
    spark: SparkSession,
    location: str,
    name: str,
    hold: bool,
    *,
    as_of: int = 0,
    interval: tuple[int, int] | None = None,
) -> DataFrame:
    """Return a progress or remap relation, which is small enough to be read by the driver."""
    view = find_progress_view(location, name, hold=hold, settings=SETTINGS)
    if view is None:
        raise UsageError(
            f'collection "{name}" of location "{location}" does not exist any more',
            hint="Read again.",
        )
    client, bindings = view
    with closing(client):
        rows = bindings.as_of(as_of) if interval is None else bindings.changes(*interval)
    return spark.createDataFrame(to_spark(rows))


def _interval(
    lower: int | str | datetime, upper: int | str | datetime, collection: CollectionState
) -> tuple[int, int]:
    """Return the frontiers of the interval, with `earliest` and `latest` resolved."""
    if lower == "earliest":
        lower = collection.since + 1 if collection.since else 0
    if upper == "latest":
        upper = collection.upper
    first, beyond = (
        word if isinstance(word, int) else time_of(word, collection) for word in (lower, upper)
    )
    return check_frontier(first), check_frontier(beyond)


def _time(word: int | str | datetime, collection: CollectionState) -> int:
    return time_of(word, collection) if isinstance(word, str) else check_as_of(word)


def _common_time(members: Sequence[_NamedCollection], as_of: int | str | datetime | None) -> int:
    if as_of is None or as_of == "latest":
        latest = min(members, key=lambda member: member.collection.upper).collection
        if latest.upper == 0:
            raise NotYetComplete(latest.name, as_of=0, upper=0)
        return latest.upper - 1
    if as_of == "earliest":
        return max(member.earliest for member in members)
    return _time(as_of, members[0].collection)


def _explain(path: str, reason: str) -> Exception | None:
    """Return the error for a file that Spark could not read: damaged, or compacted away."""
    plain = _plain(unquote(path))
    for url, held in READINGS.held().items():
        key = plain.removeprefix(f"{_plain(url)}/")
        if key == plain:
            continue
        return _compacted_away(url, key, held=held) or Corruption(
            key, where=url, detail=f"Spark could not read it. {_sentence(reason)}"
        )
    return None


def _compacted_away(url: str, key: str, *, held: bool) -> UsageError | None:
    """Return the error for a file that is no longer needed; None if the file should exist."""
    if _linked(url, key):
        return None
    return UsageError(
        f'object "{key}" of location "{url}" was compacted away while it was being read',
        detail="The reading lost its hold: the lease ran out before it was renewed, as when a "
        "computer sleeps."
        if held
        else "The reading had no hold, or lost it.",
        hint="Read again." if held else "Read again, with hold=True.",
    )


def _linked(url: str, key: str) -> bool:
    """Return whether a file should exist: it is referenced, or a hold still protects it."""
    with persist.open(url, hold=False, settings=SETTINGS) as client:
        state = client.state
        return key in state.linked() or state.garbage.get(key, -1) >= state.collected


def _sentence(reason: str) -> str:
    return f"{reason.rstrip('.')}."


def _plain(path: str) -> str:
    """Return a path or URL without its scheme, which Spark writes in different forms."""
    return path.partition(":")[2].lstrip("/")


def _scanner(spark: SparkSession, url: str, reading: ScanHold) -> Scanner:
    reader = reading.client.reader
    explain_failures(_explain)
    return Scanner(
        spark=spark,
        url=url,
        blob=reader.machine.blob,
        batches=reader.batches,
        root=find_native_root(spark, url),
        remote=connect(spark),
    )


# If Penstock is installed, Spark finds format("penstock") by itself. If it is only on the path, it
# is registered here. A second registration would print a warning.
if find_spec("pyspark_penstock") is None and (_active := SparkSession.getActiveSession()):
    register(_active)
