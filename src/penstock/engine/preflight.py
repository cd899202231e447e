"""Preflight of a pipeline file against servers and connectors, without any change.

The catalog determines the changes of a file. Only the server or the connector that executes a
change can decide whether it is possible. A server may miss a prerequisite; a connector may reject a
field.
"""

import difflib
import os
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from penstock import persist
from penstock.catalog import (
    Action,
    Change,
    Object,
    Type,
    describe,
    known_objects,
    listed_names,
    name_conflicts,
    plan,
    to_requested,
)
from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.connectors import BUILT_IN, built_in
from penstock.data import collection_name
from penstock.durable import join
from penstock.errors import (
    PenstockError,
    Problem,
    SourceError,
    StoreError,
    TransientError,
    UsageError,
)
from penstock.ingest import source_of
from penstock.materialize.backfill import (
    check_shards,
    describe_rewrites,
    lost_resources,
    replaced_resources,
)
from penstock.materialize.binding_kind import describe_collection
from penstock.materialize.connector_client import ConnectorConnection, connect
from penstock.materialize.connector_process import resolve_connector
from penstock.materialize.errors import ConnectorError, ConnectorRefused
from penstock.materialize.recovery_log import from_entries
from penstock.materialize.spec_builder import BuiltSpec, build, check_config
from penstock.persist.batch import defaults_of
from penstock.persist.lake import is_storage_location, storage_locations_below
from penstock.persist.state import columns_of
from penstock.pipeline import MaterializationSection, Pipeline, load, load_unresolved
from penstock.protocol.specs import CollectionSpec
from penstock.sources.source import Checkable, CollectionOutline, Stoppable

__all__ = ["check_objects", "plan_changes", "plan_file"]


def plan_file(file: str | Path, *, clock: Clock = SYSTEM_CLOCK) -> list[Change]:
    """Return the changes of a file and every problem that prevents them."""
    pipeline, written = load(file), load_unresolved(file)
    changes = plan_changes(pipeline, written, types=("source", "materialization"))
    objects: set[tuple[str, str]] = {("source", name) for name in pipeline.sources}
    objects |= {("materialization", name) for name in pipeline.materializations}
    return [*changes, *check_objects(pipeline, objects, changes, clock=clock)]


def plan_changes(
    pipeline: Pipeline, written: Mapping[str, Any], *, types: Sequence[Type]
) -> list[Change]:
    """Return the changes of a file that can be computed without a server or a connector."""
    unknown = [
        Change("refuse", "materialization", name, wrong.message, hint=wrong.hint)
        for name, section in pipeline.materializations.items()
        if "materialization" in types and (wrong := _no_connector(section))
    ]
    refused = {(each.type, each.name) for each in unknown}
    known = known_objects(pipeline.location)
    found = plan(known, written, types=types, environment=os.environ)
    # A connector that does not exist is a typing error; report only that.
    found = [each for each in found if (each.type, each.name) not in refused]
    refused |= {(each.type, each.name) for each in found if each.action == "refuse"}
    conflicts = [
        each
        for each in _name_conflicts(pipeline, known)
        if each.type in types and (each.type, each.name) not in refused
    ]
    return [*unknown, *conflicts, *found]


def _name_conflicts(pipeline: Pipeline, known: Sequence[Object]) -> Iterator[Change]:
    taken = [*listed_names(pipeline.location), *to_requested(known)]
    for each, holder in name_conflicts(pipeline, taken):
        kind: Type = "materialization" if each.type == "materialization" else "source"
        what = f"{describe(each)} cannot be created: the name belongs to {holder}"
        hint = "Choose another name in the file, or drop the object that has it."
        yield Change("refuse", kind, each.owner or each.name, what, hint=hint)


def check_objects(
    pipeline: Pipeline,
    objects: Collection[tuple[str, str]],
    changes: Sequence[Change],
    *,
    clock: Clock = SYSTEM_CLOCK,
    stop: threading.Event | None = None,
) -> list[Change]:
    """Return the changes that servers and connectors would make or reject for these objects.

    Nothing is changed upstream or at the endpoints. A source that is not new in `changes`
    already runs, so only its connection is checked. Waits for a source end soon after `stop` is
    set.
    """
    new = {each.name for each in changes if each.type == "source" and each.is_new}
    changed = {(each.type, each.name) for each in changes}
    sources = [name for name in pipeline.sources if ("source", name) in objects]
    materializations = [
        name
        for name, section in pipeline.materializations.items()
        if ("materialization", name) in objects and not _no_connector(section)
    ]
    if not sources and not materializations:
        return []
    with ThreadPoolExecutor(4, thread_name_prefix="check") as pool:
        checks = dict(
            zip(
                sources,
                pool.map(
                    lambda name: _check_source(
                        name, pipeline, clock, started=name not in new, stop=stop
                    ),
                    sources,
                ),
                strict=True,
            )
        )
        outlines = [outline for check in checks.values() for outline in check.outlines]
        shapes = _shapes(pipeline, outlines) if materializations else _Shapes({}, {}, {})
        found = [
            *(check.changes for check in checks.values()),
            *pool.map(
                lambda name: _check_materialization(
                    name,
                    pipeline,
                    shapes,
                    clock,
                    changed=("materialization", name) in changed,
                ),
                materializations,
            ),
        ]
    return [change for each in found for change in each]


@dataclass(frozen=True, slots=True)
class _SourceCheck:
    changes: list[Change]
    outlines: Sequence[CollectionOutline] = ()


@dataclass(frozen=True, slots=True)
class _Shapes:
    """Collections of the bindings as connectors see them, by name."""

    known: Mapping[str, tuple[CollectionSpec, Any]]
    invalid: Mapping[str, UsageError]
    """Errors in the `collections` section of the file, by collection."""

    predecessors: Mapping[str, frozenset[str]]
    """Ids of the earlier collections that had a name."""


def _check_source(
    name: str,
    pipeline: Pipeline,
    clock: Clock,
    *,
    started: bool,
    stop: threading.Event | None,
) -> _SourceCheck:
    source = source_of(name, pipeline.sources[name], pipeline.location, clock)
    if not isinstance(source, Checkable):
        return _SourceCheck([])
    if stop is not None and isinstance(source, Stoppable):
        source.use_stop(stop)
    try:
        outlines = source.check(started=started)
    except (TransientError, StoreError) as error:
        return _SourceCheck([*_problems("unreachable", "source", name, error)])
    except PenstockError as error:
        return _SourceCheck([*_problems("refuse", "source", name, error)])
    omitted = [
        Change("note", "source", name, f"collection {outline.name} omits column {column}: {why}")
        for outline in outlines
        for column, why in outline.omitted.items()
    ]
    return _SourceCheck(omitted, outlines)


def _check_materialization(
    name: str, pipeline: Pipeline, shapes: _Shapes, clock: Clock, *, changed: bool
) -> list[Change]:
    section = pipeline.materializations[name]
    found: list[Change] = []
    try:
        with ExitStack() as stack:
            address, security = resolve_connector(stack, section.connector, clock)
            with connect(address, security) as connection:
                found.extend(_applied(name, section, pipeline, shapes, connection, changed=changed))
    except ConnectorRefused as error:
        found += _problems("refuse", "materialization", name, error)
    except (ConnectorError, TransientError, StoreError) as error:
        found += _problems("unreachable", "materialization", name, error)
    except PenstockError as error:
        found += _problems("refuse", "materialization", name, error)
    return found


def _problems(action: Action, of: Type, name: str, error: PenstockError) -> Iterator[Change]:
    problems = error.problems or [Problem(str(error), error.detail, error.hint)]
    for problem in problems:
        what = problem.message
        if isinstance(error, SourceError) and len(problems) == 1:
            what = str(error)
        yield Change(action, of, name, what, detail=problem.detail, hint=problem.hint)


def _no_connector(section: MaterializationSection) -> Problem | None:
    """Return the error of an invalid built-in connector; None for a valid one or an address."""
    if not isinstance(section.connector, str) or section.connector in BUILT_IN:
        return None
    try:
        built_in(section.connector)
    except UsageError as error:
        return Problem(str(error), error.detail, error.hint)
    return None


def _applied(
    name: str,
    section: MaterializationSection,
    pipeline: Pipeline,
    shapes: _Shapes,
    connection: ConnectorConnection,
    *,
    changed: bool,
) -> Iterator[Change]:
    """Validate the bindings whose collections are known, and the endpoint in any case."""
    known = [each for each in section.bindings if each.collection in shapes.known]
    missing = sorted({each.collection for each in section.bindings} - shapes.known.keys())
    for each in missing:
        if each in shapes.invalid:
            yield from _problems("refuse", "materialization", name, shapes.invalid[each])
        elif wrong := _never(each, pipeline):
            yield Change("refuse", "materialization", name, wrong.message, hint=wrong.hint)
    if missing:
        check_config(name, section, connection)
        what = f"its fields are chosen once there is {', '.join(missing)}"
        yield Change("note", "materialization", name, what)
    section = section.model_copy(update={"bindings": tuple(known)})
    state = _state_of(name, pipeline)
    log = from_entries(state)

    def predecessors(collection: str) -> frozenset[str]:
        return shapes.predecessors.get(collection, frozenset())

    built = build(
        name,
        section,
        [shapes.known[each.collection] for each in known],
        connection,
        append_only=pipeline.append_only(),
        is_replaced=replaced_resources(section, log, predecessors),
    )
    if log is not None:
        lost_resources(section, built, log, predecessors, ())
        check_shards(section, built, log, predecessors)
    if changed:
        yield from _reduced(name, built)
    if not missing and (description := built.apply(connection, dry_run=True).strip()):
        yield Change("note", "materialization", name, f"its connector would: {description}")
    for rewrite in describe_rewrites(section, built, state, predecessors):
        yield Change("backfill", "materialization", name, rewrite)


def _state_of(name: str, pipeline: Pipeline) -> Mapping[str, Any]:
    """Return the recovery log of a materialization; empty before its first start."""
    url = join(pipeline.location, name)
    if not is_storage_location(url):
        return {}
    with persist.open(url, hold=False) as client:
        if client.state.named(f"{name}/state") is None:
            return {}
        found = client.collection(f"{name}/state")
        return dict(each.data for each in found.snapshot(found.upper - 1)) if found.upper else {}


def _reduced(name: str, built: BuiltSpec) -> Iterator[Change]:
    """Yield notes for the columns and deletes that the endpoint does not receive."""
    for binding, omitted, deletes in zip(
        built.spec.bindings, built.omitted, built.deletes, strict=True
    ):
        resource = ".".join(binding.resource_path)
        for column, why in omitted.items():
            what = f"resource {resource} omits column {column}: {why}"
            yield Change("note", "materialization", name, what)
        if not deletes:
            what = f"resource {resource} ignores deletes of {binding.collection.collection}"
            yield Change("note", "materialization", name, what)


def _never(collection: str, pipeline: Pipeline) -> Problem | None:
    """Return the reason why a missing collection cannot appear later; None if it may."""
    source = collection_name.source_of(collection, pipeline.sources)
    if source is None:
        source = collection.partition(".")[0]
        there = [*pipeline.sources]
        close = difflib.get_close_matches(source, there, n=1)
        meant = f"Did you mean {close[0]}{collection.removeprefix(source)}? " if close else ""
        return Problem(
            f'there is no collection "{collection}", and no source "{source}" to make it',
            hint=f"{meant}The sources are {', '.join(there)}."
            if there
            else f'Add source "{source}" to the file.',
        )
    section = pipeline.sources[source]
    made = section.kind.collections(source, section.config)
    if made is None or collection in made:
        return None
    close = difflib.get_close_matches(collection, made, n=1, cutoff=0.0)
    return Problem(
        f'source "{source}" makes no collection "{collection}"',
        hint=f"Did you mean {close[0]}? Its collections are {', '.join(made)}.",
    )


def _shapes(pipeline: Pipeline, outlines: Sequence[CollectionOutline]) -> _Shapes:
    """Return the bound collections: existing ones, and the ones of sources to be created."""
    wanted = {
        each.collection
        for section in pipeline.materializations.values()
        for each in section.bindings
    }
    columns = {each.name: (each.schema, each.key) for each in outlines if each.name in wanted}
    defaults: dict[str, Mapping[str, pa.Scalar]] = {}
    predecessors: dict[str, frozenset[str]] = {}
    for url in storage_locations_below(pipeline.location):
        with persist.open(url, hold=False) as client:
            for name in wanted.intersection(client.state.listed()):
                state = client.state.named(name)
                if state is not None:
                    schema = state.schemas[-1]
                    columns[name] = columns_of(schema), schema.key
                    defaults[name] = defaults_of(state.schemas)
                    location = client.state.location
                    ids = (f"{location}/{id}" for id in state.predecessors)
                    predecessors[name] = frozenset(ids)
    known, invalid = {}, {}
    for name, (schema, key) in columns.items():
        section = pipeline.collections.get(name)
        try:
            known[name] = describe_collection(name, schema, key, section, defaults.get(name, {}))
        except UsageError as error:
            invalid[name] = error
    return _Shapes(known, invalid, predecessors)
