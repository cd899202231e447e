"""Changes between two fingerprints.

`compare` lists each change. `drift_actions.py` chooses the action, in most cases one of three:

    evolve          columns were appended, and older rows hold one known value in them
    resync          rows may differ from the rows in the stream: rewritten, republished, leaves
                    attached or detached, another filter, a type that prints differently
    mark errored    the table or the publication no longer exists

New storage may have a harmless explanation. `ALTER … TYPE integer USING amount * 100` gives a table
new storage and new values. TRUNCATE also gives new storage, and the stream reports it. VACUUM FULL,
CLUSTER and similar commands give new storage and keep the rows. See `is_explained`.
"""

from collections.abc import Collection, Iterator, Mapping

from penstock.sources.postgres.catalog import is_streamed
from penstock.sources.postgres.changes import (
    AppendedColumn,
    AttachedLeaf,
    Change,
    ColumnListChanged,
    ColumnsChanged,
    FilterChanged,
    IdentityChanged,
    KeyChanged,
    LeavesChanged,
    OperationsChanged,
    PublicationAltered,
    PublicationDropped,
    PublicationReplaced,
    Renamed,
    RenamedColumn,
    Republished,
    RetypedColumn,
    Rewritten,
    TableAdded,
    TableDropped,
    TableUnpublished,
    TypeChanged,
)
from penstock.sources.postgres.fingerprint import (
    ColumnMark,
    Fingerprint,
    IndexMark,
    PartitionMark,
    TableMark,
)
from penstock.sources.postgres.publication import Publication

__all__ = ["compare", "is_explained"]


def compare(before: Fingerprint, after: Fingerprint) -> list[Change]:
    """Return all changes: first of the publication, then by table.

    Tables that are published in neither fingerprint are ignored.
    """
    if after.publication is None:
        dropped: list[Change] = [] if before.publication is None else [PublicationDropped()]
        return dropped + [
            TableDropped(mark.oid, mark.name)
            for mark in before.tables.values()
            if mark.published and mark.oid not in after.tables
        ]
    changes = list(_publication_changes(before.publication, after.publication))
    for oid in sorted({*before.tables, *after.tables}):
        changes += _table_changes(oid, before, after)
    return changes


def is_explained(
    change: Rewritten, truncated: Mapping[int, Collection[int]], *, root: int = 0
) -> bool:
    """Return whether the stream reports all effects of new storage.

    That is so in two cases. First, the change is harmless by itself: the rows of the table in
    pg_attribute are as before. Only three kinds of new storage leave them so: a command that keeps
    the rows, TRUNCATE, and a table that was unlogged for a while. A table that is published by its
    own name cannot become unlogged. A TRUNCATE is in the stream if the publication sends
    truncations.

    Second, the last transaction that wrote the row of the table in pg_class sent a Truncate message
    for it since the previous fingerprint. Then no later command rewrote the table, and earlier
    rewrites do not matter. `truncated` holds these transactions by table. A leaf is never harmless
    by itself, because a TRUNCATE of a leaf is not sent; for a leaf the transactions of its `root`
    also count. A TRUNCATE within a savepoint has one transaction id in the catalog and another in
    the stream, so it explains nothing here.
    """
    if change.harmless:
        return True
    return change.xid in truncated.get(change.table, ()) or change.xid in truncated.get(root, ())


def _publication_changes(before: Publication | None, after: Publication) -> Iterator[Change]:
    if before is None or before.oid != after.oid:
        yield PublicationReplaced(0 if before is None else before.oid, after.oid)
    elif before.operations != after.operations:
        yield OperationsChanged(before.operations, after.operations)
    elif before.row_xid != after.row_xid:
        yield PublicationAltered()


def _table_changes(oid: int, before: Fingerprint, after: Fingerprint) -> Iterator[Change]:
    was, now = before.tables.get(oid), after.tables.get(oid)
    if now is None:
        if was is not None and was.published:
            yield TableDropped(oid, was.name)
        return
    if was is None or not was.published:
        if now.published:
            yield TableAdded(oid, now.name)
        return
    if was.name != now.name:
        yield Renamed(oid, was.name, now.name)
    if not now.published:
        yield TableUnpublished(oid, now.name)
        return
    if not was.tokens & now.tokens:
        yield Republished(oid, now.name)
    if was.storage != now.storage:
        harmless = _is_harmless(was, now, before.publication, after.publication)
        yield Rewritten(oid, now.name, now.row_xid, harmless)
    yield from _column_changes(was, now, after.publication)
    yield from _column_list_changes(was, now, before.publication, after.publication)
    if was.filter != now.filter:
        yield FilterChanged(oid, now.name)
    yield from _identity_changes(was, now)
    yield from _leaf_changes(was, now)
    yield from _type_changes(now, was, before, after)


def _is_harmless(
    was: TableMark, now: TableMark, old: Publication | None, new: Publication | None
) -> bool:
    by_name = any(token.startswith("t") for token in was.tokens & now.tokens)
    sent = old is not None and old == new and "truncate" in old.operations
    untouched = [(column.number, column.row_xid) for column in was.columns] == [
        (column.number, column.row_xid) for column in now.columns
    ]
    # The expression of a generated column is not stored in pg_attribute.
    computed = any(column.generated for column in _streamed_columns(now, new))
    return by_name and sent and untouched and not computed


def _column_changes(
    was: TableMark, now: TableMark, publication: Publication | None
) -> Iterator[Change]:
    old = {column.number: column for column in was.columns}
    new = {column.number: column for column in now.columns}
    common = [(old[number], new[number]) for number in old if number in new]
    change = ColumnsChanged(
        now.oid,
        now.name,
        appended=tuple(
            _appended(column, was, now, publication) for n, column in new.items() if n not in old
        ),
        renamed=tuple(
            RenamedColumn(o.number, o.name, n.name) for o, n in common if o.name != n.name
        ),
        dropped=tuple(column.name for number, column in old.items() if number not in new),
        retyped=tuple(
            RetypedColumn(n.name, (o.type, o.typmod), (n.type, n.typmod))
            for o, n in common
            if (o.type, o.typmod) != (n.type, n.typmod)
        ),
        loosened=tuple(n.name for o, n in common if n.nullable and not o.nullable),
        tightened=tuple(n.name for o, n in common if o.nullable and not n.nullable),
    )
    if change != ColumnsChanged(now.oid, now.name):
        yield change


def _appended(
    column: ColumnMark, was: TableMark, now: TableMark, publication: Publication | None
) -> AppendedColumn:
    # Rows that were rewritten contain the column themselves.
    old = {mark.oid: mark.storage for mark in was.partitions}
    written = was.storage != now.storage or any(
        old.get(mark.oid, mark.storage) != mark.storage for mark in now.partitions
    )
    return AppendedColumn(
        column.name,
        column.number,
        column.type,
        column.typmod,
        default=column.missing[0] if column.missing else None,
        known=len(column.missing) <= 1 and column.generated == "" and not written,
        streamed=column in _streamed_columns(now, publication),
    )


def _streamed_columns(table: TableMark, publication: Publication | None) -> list[ColumnMark]:
    sends_generated = publication is not None and publication.generated
    return [
        column
        for column in table.columns
        if is_streamed(
            column.number, column.generated, listed=table.listed, generated_too=sends_generated
        )
    ]


def _column_list_changes(
    was: TableMark, now: TableMark, old: Publication | None, new: Publication | None
) -> Iterator[Change]:
    both = {column.number for column in was.columns} & {column.number for column in now.columns}
    before = {
        column.number: column.name
        for column in _streamed_columns(was, old)
        if column.number in both
    }
    after = {
        column.number: column.name
        for column in _streamed_columns(now, new)
        if column.number in both
    }
    if before.keys() != after.keys():
        yield ColumnListChanged(now.oid, now.name, tuple(before.values()), tuple(after.values()))


def _identity_changes(was: TableMark, now: TableMark) -> Iterator[Change]:
    before = was.replica_identity, _column_names(was, was.index)
    after = now.replica_identity, _column_names(now, now.index)
    if (before[0], was.index and was.index.columns) != (after[0], now.index and now.index.columns):
        yield IdentityChanged(now.oid, now.name, before, after)
    if was.key != now.key:
        yield KeyChanged(
            now.oid,
            now.name,
            None if was.key is None else _column_names(was, was.key),
            None if now.key is None else _column_names(now, now.key),
        )
    old = {mark.oid: mark for mark in was.partitions}
    for mark in now.partitions:
        if mark.kind == "p":
            continue
        # A new leaf is expected to have the replica identity of its root.
        other = old.get(mark.oid)
        here = mark.replica_identity, mark.identity
        there = after if other is None else (other.replica_identity, other.identity)
        if here != there:
            yield IdentityChanged(now.oid, now.name, there, here, leaf=mark.name)


def _column_names(table: TableMark, index: IndexMark | None) -> tuple[str, ...]:
    names = {column.number: column.name for column in table.columns}
    return tuple(names[number] for number in index.columns) if index else ()


def _leaf_changes(was: TableMark, now: TableMark) -> Iterator[Change]:
    old = {mark.oid: mark for mark in was.partitions}
    new = {mark.oid: mark for mark in now.partitions}
    stayed = {oid for oid in old if oid in new and _path(oid, old) == _path(oid, new)}
    leaves = [mark for mark in now.partitions if mark.kind != "p"]
    change = LeavesChanged(
        now.oid,
        now.name,
        attached=tuple(
            AttachedLeaf(
                mark.oid, mark.name, _was_created_attached(mark, old, new) and mark.kind == "r"
            )
            for mark in leaves
            if mark.oid not in stayed
        ),
        detached=tuple(
            mark.name for mark in was.partitions if mark.kind != "p" and mark.oid not in new
        ),
        rewritten=tuple(
            Rewritten(mark.oid, mark.name, mark.row_xid)
            for mark in leaves
            if mark.oid in stayed and mark.storage != old[mark.oid].storage
        ),
    )
    if change != LeavesChanged(now.oid, now.name):
        yield change


def _path(oid: int, marks: Mapping[int, PartitionMark]) -> tuple[tuple[int, int], ...]:
    """Return the attachments that connect a partition to the root."""
    path = []
    while oid in marks:
        path.append((oid, marks[oid].attached))
        oid = marks[oid].parent
    return tuple(path)


def _was_created_attached(
    leaf: PartitionMark, old: Mapping[int, PartitionMark], new: Mapping[int, PartitionMark]
) -> bool:
    """Return whether the leaf and all new partitions above it were created as partitions."""
    at: PartitionMark | None = leaf
    while at is not None:
        known = old.get(at.oid)
        if known is None and not at.born:
            return False
        if known is not None and (known.attached, known.parent) != (at.attached, at.parent):
            return False
        at = new.get(at.parent)
    return True


def _type_changes(
    now: TableMark, was: TableMark, before: Fingerprint, after: Fingerprint
) -> Iterator[Change]:
    types_before = {column.number: column.type for column in was.columns}
    using: dict[int, list[str]] = {}
    for column in now.columns:
        if types_before.get(column.number) == column.type:
            for oid in _used_types(column.type, after):
                using.setdefault(oid, []).append(column.name)
    for oid, columns in sorted(using.items()):
        old, new = before.types.get(oid), after.types[oid]
        if old is None:
            continue
        labels = dict(new.labels)
        relabelled = any(labels.get(label) != text for label, text in old.labels)
        # Attribute names are not part of the printed value.
        was_made = [(number, *rest) for number, _, *rest in old.attributes]
        is_made = [(number, *rest) for number, _, *rest in new.attributes]
        if relabelled or was_made != is_made:
            yield TypeChanged(now.oid, now.name, tuple(columns), new.name)


def _used_types(oid: int, fingerprint: Fingerprint) -> set[int]:
    reached: set[int] = set()
    ahead = [oid]
    while ahead:
        mark = fingerprint.types.get(ahead.pop())
        if mark is not None and mark.oid not in reached:
            reached.add(mark.oid)
            ahead += mark.uses
    return reached
