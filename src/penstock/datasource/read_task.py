"""Rows of one Spark task: a part of the contents as of a time, or of the changes.

`persist.scan` divides contents into a base and deltas. With D for the consolidated deltas, a
task returns one of

    KEPT      its part scans of the base, without the rows that D deletes
    BROUGHT   the rows that D inserts
    SUM       everything consolidated, if there is no base or only a small one

A row that D deletes is a row of the base, byte for byte. Adding the negative half of D to a
part scan leaves the remaining rows, with the same comparison as everywhere else. Every task
reads the deltas that it needs: tasks share nothing.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import chain, islice, repeat
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
from msgspec.structs import replace

from penstock.data import DIFF, TIME, advance, consolidate
from penstock.errors import Corruption, InternalError, UsageError
from penstock.persist import open
from penstock.persist.batch import PartScan
from penstock.persist.scan.plan import ChangesScan, SnapshotScan
from penstock.persist.scan.task import ROWS_AT_ONCE, SETTINGS, read_parts
from penstock.persist.state import (
    CollectionState,
    SchemaVersion,
    Stored,
    stored_columns_of,
)

__all__ = ["Kind", "Rows", "Task", "changes_tasks", "contents_tasks", "rows_of", "updates_of"]

PACK_BYTES: Final = 16 << 20
"""A task reads several part scans, up to this size at rest."""


class Kind(Enum):
    """Result of a task."""

    CHANGES = "changes"
    KEPT = "kept"
    BROUGHT = "brought"
    SUM = "sum"


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Complete description of a read task."""

    kind: Kind
    url: str
    collection: CollectionState
    """The state of the collection, without its batches."""

    schema: SchemaVersion
    part_scans: tuple[PartScan, ...]
    deltas: tuple[PartScan, ...] = ()
    as_of: int = 0
    """Time of the contents, and of all their rows."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows that were computed while the query was planned."""

    rows: pa.Table


def contents_tasks(
    url: str, scan: SnapshotScan, schema: SchemaVersion, *, max_task_bytes: int
) -> list[Task]:
    """Return the tasks that together read the contents as rows of `schema`.

    Raises:
        UsageError: A task would have to consolidate more than `max_task_bytes`.
    """
    if scan.delta_memory > max_task_bytes:
        raise UsageError(
            f'collection "{scan.collection.name}" is too large to consolidate in one task '
            f"as of {scan.as_of}",
            detail=f"It needs up to {scan.delta_memory} bytes; maxTaskBytes is {max_task_bytes}.",
            hint="Read the collection with penstock.spark.read, which consolidates in Spark, "
            "or run penstock compact first, or raise maxTaskBytes.",
        )

    def task(
        kind: Kind, part_scans: tuple[PartScan, ...], deltas: tuple[PartScan, ...] = ()
    ) -> Task:
        return Task(
            kind=kind,
            url=url,
            collection=replace(scan.collection, batches=()),
            schema=schema,
            part_scans=part_scans,
            deltas=deltas,
            as_of=scan.as_of,
        )

    packs = list(_pack(scan.base))
    if not scan.deltas:
        return [task(Kind.KEPT, pack) for pack in packs] or [task(Kind.SUM, ())]
    if len(packs) <= 1:
        return [task(Kind.SUM, scan.base + scan.deltas)]
    base_tasks = [task(Kind.KEPT, pack, scan.deltas) for pack in packs]
    return [*base_tasks, task(Kind.BROUGHT, (), scan.deltas)]


def changes_tasks(url: str, scan: ChangesScan, schema: SchemaVersion) -> list[Task]:
    """Return the tasks that read the updates as rows of `schema`, unconsolidated."""
    light = replace(scan.collection, batches=())
    return [
        Task(kind=Kind.CHANGES, url=url, collection=light, schema=schema, part_scans=pack)
        for pack in _pack(scan.part_scans)
    ]


def updates_of(task: Task) -> Iterator[pa.Table]:
    """Yield the result of a task as updates: the columns, time and diff."""
    match task.kind:
        case Kind.CHANGES:
            yield from _read(task, task.part_scans)
        case Kind.SUM:
            contents = _consolidated(task, task.part_scans)
            _check_not_negative(task, contents)
            yield contents
        case Kind.BROUGHT:
            deltas_sum = _consolidated(task, task.deltas)
            yield deltas_sum.filter(pc.greater(deltas_sum.column(DIFF), 0))
        case Kind.KEPT:
            deltas_sum = _consolidated(task, task.deltas)
            deletes = deltas_sum.filter(pc.less(deltas_sum.column(DIFF), 0))
            for rows in _read(task, task.part_scans):
                base = advance(rows, task.as_of)
                if deletes.num_rows:
                    # Deletes of rows in other tasks stay negative here.
                    base = consolidate(pa.concat_tables([base, deletes]))
                    base = base.filter(pc.greater(base.column(DIFF), 0))
                yield base


def rows_of(task: Task) -> Iterator[pa.Table]:
    """Yield the result of a task as rows, repeated by their diff."""
    for updates in updates_of(task):
        for start in range(0, updates.num_rows, ROWS_AT_ONCE):
            chunk = updates.slice(start, ROWS_AT_ONCE)
            rows = chunk.drop_columns([TIME, DIFF])
            counts = chunk.column(DIFF)
            if pc.min_max(counts)["max"].as_py() == 1:
                yield rows
                continue
            numbers = chain.from_iterable(map(repeat, range(len(rows)), counts.to_pylist()))
            while indices := list(islice(numbers, ROWS_AT_ONCE)):
                yield rows.take(pa.array(indices, pa.int64()))


def _consolidated(task: Task, part_scans: tuple[PartScan, ...]) -> pa.Table:
    nothing = stored_columns_of(task.schema).empty_table()
    updates = pa.concat_tables([nothing, *_read(task, part_scans)])
    return consolidate(advance(updates, task.as_of))


def _read(task: Task, part_scans: Iterable[PartScan]) -> Iterator[pa.Table]:
    try:
        yield from read_parts(task.url, task.collection, part_scans, task.schema)
    except Corruption as error:
        with open(task.url, hold=False, settings=SETTINGS) as client:
            if error.key in client.state.linked():
                raise
        raise UsageError(
            f'collection "{task.collection.name}" was compacted while it was being read',
            detail="The read had no hold, or its hold had expired.",
            hint="Read again, with hold, and with a holdFor longer than the query.",
        ) from error


def _check_not_negative(task: Task, contents: pa.Table) -> None:
    least = pc.min(contents.column(DIFF)).as_py()
    if least is not None and least < 0:
        raise InternalError(
            f'collection "{task.collection.name}" has a row with multiplicity {least} '
            f"as of {task.as_of}",
            detail="The row was deleted more often than it was inserted.",
            hint="To find the time, print the changes with penstock tail.",
        )


def _pack(part_scans: Iterable[PartScan]) -> Iterator[tuple[PartScan, ...]]:
    """Group part scans into packs of at most `PACK_BYTES`, or one larger scan."""
    pack: list[PartScan] = []
    size = 0
    for part_scan in part_scans:
        bytes_at_rest = (
            part_scan.part.size if isinstance(part_scan.part, Stored) else len(part_scan.part.rows)
        )
        if pack and size + bytes_at_rest > PACK_BYTES:
            yield tuple(pack)
            pack, size = [], 0
        pack.append(part_scan)
        size += bytes_at_rest
    if pack:
        yield tuple(pack)
