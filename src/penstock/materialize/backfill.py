"""Resources whose rows are all replaced, and resources that the endpoint has lost.

All rows of a resource are replaced for one of three reasons:

    the backfill was raised        the pipeline file requests it
    the collection was replaced    a resync moved its name to another collection
    the binding was removed        and added again, so the contents are not known

The next transaction truncates such a resource. It removes rows that this materialization did
not write only with `--allow-drop`. The check compares row counts: foreign rows exist if the
resource holds more rows than the collection had as of the frontier of the resource.

A resource with another key or an incompatible type is dropped and created again in that
transaction. This also needs `--allow-drop`.

If the recovery log has committed a resource that the endpoint no longer has, another user
dropped it. Apply would create it empty, while the checkpoint still covers all rows. The
resource is therefore rejected before Apply, unless all rows are stored again (hazard C15).
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import pyarrow.compute as pc

from penstock.data import DIFF
from penstock.errors import UsageError
from penstock.materialize.binding_kind import BindingKind, BindingPlan, DocumentsKind, RowsKind
from penstock.materialize.checkpoint import NOTHING, ResourceProgress, path_text
from penstock.materialize.inputs import ClaimedCollection
from penstock.materialize.intervals import missing_interval
from penstock.materialize.layout import KnownLayouts
from penstock.materialize.recovery_log import RecoveryLog, ShardLog, from_entries
from penstock.materialize.shard_transaction import needs_truncation
from penstock.materialize.spec_builder import BuiltSpec, IncompatibleResource
from penstock.persist.scan.plan import scan_snapshot
from penstock.persist.scan.task import read_parts
from penstock.pipeline import BindingSection, MaterializationSection

__all__ = [
    "ForeignRows",
    "LostResource",
    "Predecessors",
    "SeveralShards",
    "check_foreign_rows",
    "check_recreated",
    "check_shards",
    "describe_rewrites",
    "lost_resources",
    "replaced_bindings",
    "replaced_resources",
    "rows_written",
    "truncated_resources",
]

Predecessors = Callable[[str], Collection[str]]
"""Function from a collection name to the ids of its earlier collections (`ResourceProgress`)."""


class ForeignRows(UsageError):
    """A replacement would remove rows that the materialization did not write."""

    def __init__(
        self,
        path: str,
        reached: ResourceProgress,
        binding: BindingSection,
        *,
        rows: int,
        written: int,
    ) -> None:
        raised = reached.backfill < binding.backfill
        other = f"set backfill back to {reached.backfill}" if raised else "delete those rows"
        super().__init__(
            f"{'backfill' if raised else 'replacement'} of resource {path} would remove "
            f"{rows - written} rows that the materialization did not write",
            detail=f"The resource holds {rows} rows, and the collection had {written} when the "
            "resource was written last."
            + ("" if raised else " The collection or the binding was replaced since."),
            hint=f"Run with --allow-drop to replace all rows, or {other}.",
        )


class LostResource(UsageError):
    """A resource that the recovery log has committed no longer exists in the endpoint."""

    def __init__(
        self,
        materialization: str,
        resource: str,
        progress: ResourceProgress,
        *,
        shards: int,
        has_connector_state: bool,
    ) -> None:
        """Describe the lost resource.

        A connector with state in the recovery log needs the resource: at the next start, it
        completes its last commit there. Such a connector cannot replace a lost resource.
        """
        remedy = f"write it again: set the backfill of its binding to {progress.backfill + 1}"
        if shards > 1:
            remedy += " and shards to 1 until it is written"
        if has_connector_state:
            remedy = "name another resource in the binding"
        super().__init__(
            f'resource "{resource}" of materialization "{materialization}" does not exist any more',
            detail=f"The recovery log has committed it up to {progress.frontier}. A new resource "
            "would miss the rows that were stored before, so none was created.",
            hint=f"Restore the resource; or {remedy}.",
        )


class SeveralShards(UsageError):
    """A resource must be truncated, and several shards cannot do so."""

    def __init__(self, materialization: str, resource: str) -> None:
        super().__init__(
            f'resource "{resource}" of materialization "{materialization}" cannot be written again '
            "by several shards",
            detail="The resource must be truncated first. A shard cannot do so, as it does not "
            "know which rows are its own.",
            hint="Set shards: 1 until the resource is written.",
        )


def replaced_bindings(
    section: MaterializationSection, built: BuiltSpec, log: RecoveryLog, predecessors: Predecessors
) -> Mapping[int, ResourceProgress]:
    """Return the bindings whose rows are replaced next, with the progress of their resources.

    The keys are binding numbers.
    """
    replaced: dict[int, ResourceProgress] = {}
    for number, binding in enumerate(built.spec.bindings):
        path = path_text(binding.resource_path)
        for shard in log.shards:
            reached = _reached(shard, path)
            if _is_replaced(reached, section.bindings[number], path, log, predecessors):
                assert reached is not None
                replaced[number] = reached
    return replaced


def lost_resources(
    section: MaterializationSection,
    built: BuiltSpec,
    log: RecoveryLog,
    predecessors: Predecessors,
    applied: Collection[str],
) -> Collection[str]:
    """Return the resources that the endpoint has lost and that are written again completely.

    `applied` holds the resource paths of the last applied specification. Such a resource may
    hold a planned first transaction whose commit response was lost.

    Raises:
        LostResource: rows of a lost resource would not be stored again.
    """
    lost = set[str]()
    for number, (binding, answer) in enumerate(
        zip(built.spec.bindings, built.answers, strict=True)
    ):
        if not answer.absent:
            continue
        path = path_text(binding.resource_path)
        for shard in log.shards:
            reached = _reached(shard, path)
            if reached is None or not reached.frontier:
                continue
            replaced = _is_replaced(reached, section.bindings[number], path, log, predecessors)
            # A crash may leave rows of a first attempt, and several shards cannot truncate.
            if not replaced or section.shards > 1:
                resource = ".".join(binding.resource_path)
                name = built.spec.materialization
                raise LostResource(
                    name,
                    resource,
                    reached,
                    shards=section.shards,
                    has_connector_state=shard.has_connector_state,
                )
            lost.add(path)
        if log.planned is not None and path in applied:
            lost.add(path)
    return lost


def check_recreated(name: str, section: MaterializationSection, built: BuiltSpec) -> None:
    """Raise IncompatibleResource if a resource would be dropped and created again."""
    for number, answer in enumerate(built.answers):
        if answer.recreates:
            hint = "Run with --allow-drop to do so, or name another resource."
            raise IncompatibleResource(name, section, built.answers, number, hint)


def check_foreign_rows(
    section: MaterializationSection,
    built: BuiltSpec,
    log: RecoveryLog,
    predecessors: Predecessors,
    count_rows: Callable[[int, int, str], int | None],
) -> None:
    """Raise ForeignRows if a replacement would remove rows of another writer.

    `count_rows` takes a binding number, a frontier and the id of a collection. It returns the
    number of rows that the materialization wrote, or None if that is not known.
    """
    for number, reached in replaced_bindings(section, built, log, predecessors).items():
        rows = built.answers[number].rows
        written = count_rows(number, reached.frontier, reached.collection)
        if written is None or rows <= written:
            continue
        if log.planned is not None and rows == count_rows(number, log.planned, ""):
            continue  # The planned transaction was committed, and the response was lost.
        binding = section.bindings[number]
        raise ForeignRows(built.path(number), reached, binding, rows=rows, written=written)


def check_shards(
    section: MaterializationSection, built: BuiltSpec, log: RecoveryLog, predecessors: Predecessors
) -> Collection[str]:
    """Return the resources that must be truncated and that the present shards cannot truncate.

    Raises:
        SeveralShards: there is such a resource, and the file requests several shards.
    """
    if len(log.shards) == 1 and section.shards == 1:
        return ()
    paths = set[str]()
    for number, reached in replaced_bindings(section, built, log, predecessors).items():
        binding, (_, kind) = built.spec.bindings[number], built.described[number]
        path = path_text(binding.resource_path)
        counted = isinstance(kind, DocumentsKind) and kind.counted
        raised = reached.backfill < section.bindings[number].backfill
        name = section.bindings[number].collection
        known = raised and path not in log.unknown and reached.collection not in predecessors(name)
        if binding.delta_updates or not built.empties[number] or (known and not counted):
            continue
        if section.shards > 1:
            raise SeveralShards(built.spec.materialization, ".".join(binding.resource_path))
        paths.add(path)
    return paths


def replaced_resources(
    section: MaterializationSection,
    log: RecoveryLog | None,
    predecessors: Predecessors,
) -> Callable[[int, tuple[str, ...]], bool]:
    """Return a predicate for the resources that the next transaction truncates.

    The predicate takes the number of a binding and its resource path.
    """

    def is_replaced(number: int, path: tuple[str, ...]) -> bool:
        # Several shards cannot truncate a resource: a shard cannot identify its own rows.
        if log is None or section.shards > 1 or len(log.shards) != 1:
            return False
        reached, binding = _reached(log.shards[0], path_text(path)), section.bindings[number]
        return _is_replaced(reached, binding, path_text(path), log, predecessors)

    return is_replaced


def _is_replaced(
    reached: ResourceProgress | None,
    binding: BindingSection,
    path: str,
    log: RecoveryLog,
    predecessors: Predecessors,
) -> bool:
    return reached is not None and (
        reached.backfill < binding.backfill
        or reached.collection in predecessors(binding.collection)
        or path in log.unknown
    )


def describe_rewrites(
    section: MaterializationSection,
    built: BuiltSpec,
    state: Mapping[str, Any],
    predecessors: Predecessors,
) -> Iterator[str]:
    """Yield a line for each resource that the next transaction replaces or rewrites.

    `state` holds the entries of the recovery log. `penstock plan` prints the lines.
    """
    log = from_entries(state)
    if log is None:
        return
    replaced = replaced_bindings(section, built, log, predecessors)
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
                foreign = "removing rows that the materialization did not write needs --allow-drop"
                checked = f"; {foreign}" if built.deletes[number] else ""
                yield f"resource {resource}: {answer.rows} rows are replaced{checked}"
            continue
        changes = layouts.changes(built.path(number), built.layouts[number], built.filled[number])
        for shard in log.shards:
            reached = _reached(shard, path_text(binding.resource_path))
            change = changes.get(reached.layout) if reached is not None else None
            if change is not None and change.rewritten:
                fields = ", ".join(change.rewritten)
                yield f"resource {resource}: all rows are stored again, to change {fields}"
                break


def rows_written(holding: ClaimedCollection, kind: BindingKind, frontier: int) -> int | None:
    """Return the number of rows of a collection just below a frontier; None if not readable.

    The number is also None for collections of documents: several rows reduce into one document.
    """
    state, as_of = holding.state, frontier - 1
    readable = state.since <= as_of < state.upper
    if not readable or not isinstance(kind, RowsKind):
        return None
    scan = scan_snapshot(state, as_of)
    tables = read_parts(holding.url, state, (*scan.base, *scan.deltas), scan.schema)
    return sum(pc.sum(table.column(DIFF)).as_py() or 0 for table in tables)


def truncated_resources(
    built: BuiltSpec, log: RecoveryLog, bindings: Sequence[BindingPlan], upper: int
) -> frozenset[str]:
    """Return the resources that a shard would have to truncate in a transaction up to `upper`."""
    paths = set[str]()
    for shard in log.shards:
        for binding, spec in zip(bindings, built.spec.bindings, strict=True):
            if spec.delta_updates or not binding.empties:
                continue
            with suppress(UsageError):  # The shard raises it again.
                interval = missing_interval(binding.bound, shard.checkpoint or NOTHING, upper)
                if needs_truncation(binding, interval):
                    paths.add(binding.bound.path)
    return frozenset(paths)


def _reached(shard: ShardLog, path: str) -> ResourceProgress | None:
    return None if shard.checkpoint is None else shard.checkpoint.bindings.get(path)
