"""Rows that a backfill replaces, and rows among them that somebody else has put there.

A backfill truncates the resource in its first transaction. Rows that this materialization
did not write are removed only with `--allow-drop`. They are found by number: the resource
holds more rows than the collection had as of the frontier that the resource has reached.

A resource with another key or an incompatible type is dropped and created again in that
transaction, which needs `--allow-drop`, too.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import pyarrow.compute as pc

from penstock.data import DIFF
from penstock.errors import UsageError
from penstock.materialize.binding import Rows, Shape
from penstock.materialize.building import Built
from penstock.materialize.checkpoint import Reached, path_text
from penstock.materialize.known_layouts import KnownLayouts
from penstock.materialize.lakeside import Holding
from penstock.materialize.recovery import Log, ShardLog, recalled
from penstock.persist.scan import scan_snapshot
from penstock.persist.tasks import read_slices
from penstock.pipeline.file import MaterializationSection

__all__ = [
    "ForeignRows",
    "describe_rewrites",
    "replaced_by_backfill",
    "replaced_resources",
    "rows_written",
]


class ForeignRows(UsageError):
    """A backfill would remove rows that the materialization did not write."""

    def __init__(self, path: str, *, rows: int, written: int, backfill: int) -> None:
        super().__init__(
            f"backfill of resource {path} would remove {rows - written} rows that the "
            "materialization did not write",
            detail=f"The resource holds {rows} rows, and the collection had {written} when the "
            "resource was written last.",
            hint=f"Run with --allow-drop to replace all rows, or set backfill back to {backfill}.",
        )


def replaced_by_backfill(
    section: MaterializationSection, built: Built, log: Log
) -> Mapping[int, Reached]:
    """Return, by number of a binding, what the resource holds that a backfill replaces."""
    found: dict[int, Reached] = {}
    for number, binding in enumerate(built.spec.bindings):
        path = path_text(binding.resource_path)
        for shard in log.shards:
            reached = _reached(shard, path)
            if reached is not None and reached.backfill < section.bindings[number].backfill:
                found[number] = reached
    return found


def replaced_resources(
    section: MaterializationSection,
    log: Log | None,
    predecessors: Callable[[str], Collection[str]],
) -> Callable[[int, tuple[str, ...]], bool]:
    """Return whether, for a number of a binding and its path, all rows are replaced next.

    `predecessors` returns the ids of the collections that had a name before, as in `Reached`.
    """

    def is_replaced(number: int, path: tuple[str, ...]) -> bool:
        # Several shards cannot truncate a resource: no shard knows which rows are its own.
        if log is None or section.shards > 1 or len(log.shards) != 1:
            return False
        reached, binding = _reached(log.shards[0], path_text(path)), section.bindings[number]
        return reached is not None and (
            reached.backfill < binding.backfill
            or reached.collection in predecessors(binding.collection)
        )

    return is_replaced


def describe_rewrites(
    section: MaterializationSection, built: Built, state: Mapping[str, Any]
) -> Iterator[str]:
    """Yield, for people, which resources are replaced or rewritten by the next transaction.

    `state` holds the entries of the recovery log.
    """
    log = recalled(state)
    if log is None:
        return
    replaced = replaced_by_backfill(section, built, log)
    layouts = KnownLayouts.parse(state)
    for number, binding in enumerate(built.spec.bindings):
        resource, answer = ".".join(binding.resource_path), built.answers[number]
        if answer.recreates:
            yield (
                f"resource {resource}: drop and re-create with {answer.rows} rows in it, which "
                f"needs --allow-drop: {answer.recreates}"
            )
            continue
        if number in replaced:
            if not built.empties[number] and binding.delta_updates:
                yield f"resource {resource}: everything is sent again"
            elif not built.empties[number] or section.shards > 1 or len(log.shards) != 1:
                yield f"resource {resource}: all rows are stored again; rows of others stay"
            else:
                yield (
                    f"resource {resource}: {answer.rows} rows are replaced; removing rows that "
                    "the materialization did not write needs --allow-drop"
                )
            continue
        changes = layouts.changes(built, number)
        for shard in log.shards:
            reached = _reached(shard, path_text(binding.resource_path))
            change = changes.get(reached.layout) if reached is not None else None
            if change is not None and change.rewritten:
                fields = ", ".join(change.rewritten)
                yield f"resource {resource}: all rows are stored again, to change {fields}"
                break


def rows_written(holding: Holding, shape: Shape, reached: Reached) -> int | None:
    """Return how many rows a collection had as of a frontier; None if that is not known."""
    state, as_of = holding.state, reached.frontier - 1
    readable = reached.collection == holding.id and state.since <= as_of < state.upper
    if not readable or not isinstance(shape, Rows):
        return None
    scan = scan_snapshot(state, as_of)
    tables = read_slices(holding.url, state, (*scan.base, *scan.rest), scan.schema)
    return sum(pc.sum(table.column(DIFF)).as_py() or 0 for table in tables)


def _reached(shard: ShardLog, path: str) -> Reached | None:
    return None if shard.checkpoint is None else shard.checkpoint.bindings.get(path)
