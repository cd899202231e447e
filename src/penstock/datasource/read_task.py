"""What one task reads: a part of the contents as of a time, or of the changes.

Contents are cut as `persist.scan` has them. With D for what the rest comes to,
added up, a task gives either

    KEPT      its slices of the base, without the rows that D takes away
    BROUGHT   the rows that D brings
    SUM       all of it added up, where there is no base or only a little one

A row that D takes away is a row of the base, bit by bit; so adding D's
negative half to a slice leaves what is kept, and no key is compared by other
rules than rows are. Every task reads what it needs of D for itself: tasks share
nothing.
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
"""Slices go together into a task up to this size at rest."""


class Kind(Enum):
    """What a task makes of its slices."""

    CHANGES = "changes"
    KEPT = "kept"
    BROUGHT = "brought"
    SUM = "sum"


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """All that a task needs to know."""

    kind: Kind
    url: str
    collection: CollectionState
    """Without its batches."""

    schema: SchemaVersion
    part_scans: tuple[PartScan, ...]
    rest: tuple[PartScan, ...] = ()
    as_of: int = 0
    """When the contents are those of `as_of`, so is their time."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows that were computed where the query was planned."""

    rows: pa.Table


def contents_tasks(
    url: str, scan: SnapshotScan, schema: SchemaVersion, *, max_task_bytes: int
) -> list[Task]:
    """The tasks that give the contents as rows of `schema`, between them.

    Raises:
        UsageError: a task would have to add up more than `max_task_bytes`.
    """
    if scan.delta_memory > max_task_bytes:
        raise UsageError(
            f'collection "{scan.collection.name}" has too much to add up in one task '
            f"as of {scan.as_of}",
            detail=f"It takes up to {scan.delta_memory} bytes; maxTaskBytes is {max_task_bytes}.",
            hint="Read it with penstock.spark.read, which lets Spark add up, or let compaction "
            "run first, or raise maxTaskBytes.",
        )

    def task(kind: Kind, part_scans: tuple[PartScan, ...], rest: tuple[PartScan, ...] = ()) -> Task:
        return Task(
            kind=kind,
            url=url,
            collection=replace(scan.collection, batches=()),
            schema=schema,
            part_scans=part_scans,
            rest=rest,
            as_of=scan.as_of,
        )

    packs = list(_packed(scan.base))
    if not scan.deltas:
        return [task(Kind.KEPT, pack) for pack in packs] or [task(Kind.SUM, ())]
    if len(packs) <= 1:
        return [task(Kind.SUM, scan.base + scan.deltas)]
    kept = [task(Kind.KEPT, pack, scan.deltas) for pack in packs]
    return [*kept, task(Kind.BROUGHT, (), scan.deltas)]


def changes_tasks(url: str, scan: ChangesScan, schema: SchemaVersion) -> list[Task]:
    """The tasks that give the updates as rows of `schema`, as they are stored."""
    light = replace(scan.collection, batches=())
    return [
        Task(kind=Kind.CHANGES, url=url, collection=light, schema=schema, part_scans=pack)
        for pack in _packed(scan.part_scans)
    ]


def updates_of(task: Task) -> Iterator[pa.Table]:
    """What the task gives, as updates: the columns, their time and diff."""
    match task.kind:
        case Kind.CHANGES:
            yield from _read(task, task.part_scans)
        case Kind.SUM:
            contents = _added_up(task, task.part_scans)
            _check_not_negative(task, contents)
            yield contents
        case Kind.BROUGHT:
            added = _added_up(task, task.rest)
            yield added.filter(pc.greater(added.column(DIFF), 0))
        case Kind.KEPT:
            added = _added_up(task, task.rest)
            taken = added.filter(pc.less(added.column(DIFF), 0))
            for rows in _read(task, task.part_scans):
                base = advance(rows, task.as_of)
                if taken.num_rows:
                    # What is taken from another task's slices stays negative here.
                    base = consolidate(pa.concat_tables([base, taken]))
                    base = base.filter(pc.greater(base.column(DIFF), 0))
                yield base


def rows_of(task: Task) -> Iterator[pa.Table]:
    """The same as rows, each as often as its diff says."""
    for updates in updates_of(task):
        for start in range(0, updates.num_rows, ROWS_AT_ONCE):
            piece = updates.slice(start, ROWS_AT_ONCE)
            rows = piece.drop_columns([TIME, DIFF])
            counts = piece.column(DIFF)
            if pc.min_max(counts)["max"].as_py() == 1:
                yield rows
                continue
            numbers = chain.from_iterable(map(repeat, range(len(rows)), counts.to_pylist()))
            while some := list(islice(numbers, ROWS_AT_ONCE)):
                yield rows.take(pa.array(some, pa.int64()))


def _added_up(task: Task, part_scans: tuple[PartScan, ...]) -> pa.Table:
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
            detail="The reading had no hold, or it had run out.",
            hint="Read again, with hold, and with a holdFor as long as the query may take.",
        ) from error


def _check_not_negative(task: Task, contents: pa.Table) -> None:
    least = pc.min(contents.column(DIFF)).as_py()
    if least is not None and least < 0:
        raise InternalError(
            f'collection "{task.collection.name}" holds {least} of a row as of {task.as_of}',
            detail="It was retracted more often than it was written.",
            hint="Look at its changes with penstock tail to see when.",
        )


def _packed(part_scans: Iterable[PartScan]) -> Iterator[tuple[PartScan, ...]]:
    """Slices side by side, up to `PACK_BYTES` in each pack or one that is larger."""
    pack: list[PartScan] = []
    size = 0
    for each in part_scans:
        bytes_at_rest = each.part.size if isinstance(each.part, Stored) else len(each.part.rows)
        if pack and size + bytes_at_rest > PACK_BYTES:
            yield tuple(pack)
            pack, size = [], 0
        pack.append(each)
        size += bytes_at_rest
    if pack:
        yield tuple(pack)
