"""Progress relations and remap collections of sources, as this format reads them.

Progress is derived and no collection holds it, and the counts of a remap are offsets, so
neither is read by scanning files. Both are small: their rows are computed where Spark plans
a query, and one Spark task returns them.
"""

from contextlib import closing
from dataclasses import dataclass

import pyarrow as pa

from penstock.data import DIFF, TIME
from penstock.datasource.options import BatchOptions
from penstock.errors import UsageError
from penstock.ingest import ProgressView, find_progress_view, progress_views_in
from penstock.persist import Client, Settings

__all__ = [
    "RelationContents",
    "changes_columns",
    "find_relation_contents",
    "read_relation_changes",
    "read_relation_contents",
    "relation_in",
]


@dataclass(frozen=True, slots=True)
class RelationContents:
    """The rows of a progress relation or a remap as of one time."""

    url: str
    name: str
    as_of: int
    columns: pa.Schema


def find_relation_contents(options: BatchOptions, *, settings: Settings) -> RelationContents | None:
    """Return the relation that the options name, as of the time they mean now; None if none does.

    Raises:
        SinceError, NotYetComplete: The relation cannot be read as of that time.
    """
    located = find_progress_view(
        options.location, options.collection, hold=False, settings=settings
    )
    if located is None:
        return None
    client, relation = located
    with closing(client):
        as_of = relation.time_of(options.as_of)
        relation.as_of(as_of)
        return RelationContents(client.url, relation.name, as_of, relation.schema)


def read_relation_contents(client: Client, contents: RelationContents) -> pa.Table:
    """Return the rows of a relation as of its time."""
    return relation_in(client, contents.name).as_of(contents.as_of)


def read_relation_changes(
    relation: ProgressView, lower: int, upper: int, *, snapshot: bool
) -> pa.Table:
    """Return the changes at times in `[lower, upper)`; with `snapshot`, the contents at `lower`."""
    columns = changes_columns(relation)
    parts = [columns.empty_table()]
    if snapshot:
        rows = relation.as_of(lower)
        for name, value in ((TIME, lower), (DIFF, 1)):
            if name not in rows.schema.names:
                constant = pa.repeat(pa.scalar(value, pa.int64()), rows.num_rows)
                rows = rows.append_column(pa.field(name, pa.int64(), False), constant)
        parts.append(rows)
        lower += 1
    if lower < upper:
        parts.append(relation.changes(lower, upper))
    return pa.concat_tables([part.select(columns.names).cast(columns) for part in parts])


def changes_columns(relation: ProgressView) -> pa.Schema:
    """Return the columns of the changes of a relation: its own, then time and diff."""
    named = [field for field in relation.schema if field.name not in (TIME, DIFF)]
    return pa.schema([*named, *(pa.field(name, pa.int64(), False) for name in (TIME, DIFF))])


def relation_in(client: Client, name: str) -> ProgressView:
    """Return the relation of that name in a storage location.

    Raises:
        UsageError: The relation does not exist any more.
    """
    for relation in progress_views_in(client):
        if relation.name == name:
            return relation
    raise UsageError(
        f'progress relation "{name}" does not exist any more',
        hint="If the source was renamed, start the query again with the new name.",
    )
