"""What servers and connectors would say to a file; nothing is changed anywhere.

The catalog tells what a file changes. Whether that can be done is known to whoever is
asked to do it: a server may lack what is needed, a connector may refuse a field.
"""

import difflib
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from penstock import persist
from penstock.catalog.objects import Type, known_objects
from penstock.catalog.planning import Change, plan
from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.connectors import BUILT_IN, built_in
from penstock.data import collection_name
from penstock.data.collection_name import compose_name
from penstock.errors import PenstockError, StoreError, TransientError, UsageError
from penstock.ingest.running import source_of
from penstock.materialize.building import build, check_config
from penstock.materialize.client import Connection, connect
from penstock.materialize.errors import ConnectorError, ConnectorRefused
from penstock.materialize.hosting import reached_connector
from penstock.materialize.shapes import shape_of
from penstock.persist.lake import storage_locations_below
from penstock.persist.state import columns_of
from penstock.pipeline import Pipeline, load, load_written
from penstock.pipeline.file import MaterializationSection
from penstock.protocol.specs import CollectionSpec

__all__ = ["changes_of", "checked", "planned"]

Shapes = Mapping[str, tuple[CollectionSpec, Any]]


def planned(file: str | Path, *, clock: Clock = SYSTEM_CLOCK) -> list[Change]:
    """What a file would change, and what would be refused."""
    pipeline, written = load(file), load_written(file)
    changes = changes_of(pipeline, written, types=("source", "materialization"))
    objects: set[tuple[str, str]] = {("source", name) for name in pipeline.sources}
    objects |= {("materialization", name) for name in pipeline.materializations}
    return [*changes, *checked(pipeline, objects, changes, clock=clock)]


def changes_of(
    pipeline: Pipeline, written: Mapping[str, Any], *, types: Sequence[Type]
) -> list[Change]:
    """What a file changes, as far as it is known without asking anybody else."""
    unknown = [
        Change("refuse", "materialization", name, wrong)
        for name, section in pipeline.materializations.items()
        if "materialization" in types and (wrong := _no_connector(section))
    ]
    refused = {(each.type, each.name) for each in unknown}
    known = known_objects(pipeline.location)
    found = plan(known, written, types=types, environment=os.environ)
    # One that does not exist is a slip, whatever else would come of it.
    return unknown + [each for each in found if (each.type, each.name) not in refused]


def checked(
    pipeline: Pipeline,
    objects: Collection[tuple[str, str]],
    changes: Sequence[Change],
    *,
    clock: Clock = SYSTEM_CLOCK,
) -> list[Change]:
    """What would be done by others, or refused by them, for these objects.

    Sources of which `changes` creates nothing are followed already; of these it is only seen
    whether they are reached.
    """
    new = {each.name for each in changes if each.type == "source" and each.action == "create"}
    sources = [name for name in pipeline.sources if ("source", name) in objects]
    materializations = [
        name
        for name, section in pipeline.materializations.items()
        if ("materialization", name) in objects and not _no_connector(section)
    ]
    if not sources and not materializations:
        return []
    shapes = _shapes(pipeline) if materializations else {}
    with ThreadPoolExecutor(4, thread_name_prefix="check") as pool:
        found = [
            *pool.map(
                lambda name: [*_source(name, pipeline, clock, followed=name not in new)], sources
            ),
            *pool.map(
                lambda name: [*_materialization(name, pipeline, shapes, clock)], materializations
            ),
        ]
    return [change for each in found for change in each]


def _source(name: str, pipeline: Pipeline, clock: Clock, *, followed: bool) -> Iterator[Change]:
    source = source_of(name, pipeline.sources[name], pipeline.location, clock)
    try:
        source.check(followed=followed)
    except (TransientError, StoreError) as error:
        yield Change("note", "source", name, f"cannot be checked now: {_told(error)}")
    except PenstockError as error:
        yield Change("refuse", "source", name, _told(error))


def _materialization(
    name: str, pipeline: Pipeline, shapes: Shapes, clock: Clock
) -> Iterator[Change]:
    section = pipeline.materializations[name]
    try:
        with ExitStack() as stack:
            address, security = reached_connector(stack, section.connector, clock)
            with connect(address, security) as connection:
                yield from _applied(name, section, pipeline, shapes, connection)
    except ConnectorRefused as error:
        yield Change("refuse", "materialization", name, _told(error))
    except (ConnectorError, TransientError, StoreError) as error:
        yield Change("note", "materialization", name, f"cannot be checked now: {_told(error)}")
    except PenstockError as error:
        yield Change("refuse", "materialization", name, _told(error))


def _no_connector(section: MaterializationSection) -> str:
    """Why its connector cannot be one of ours; empty if it can, or is somebody else's."""
    if not isinstance(section.connector, str) or section.connector in BUILT_IN:
        return ""
    try:
        built_in(section.connector)
    except UsageError as error:
        return _told(error)
    return ""


def _applied(
    name: str,
    section: MaterializationSection,
    pipeline: Pipeline,
    shapes: Shapes,
    connection: Connection,
) -> Iterator[Change]:
    missing = sorted({each.collection for each in section.bindings} - shapes.keys())
    for each in missing:
        if wrong := _never(each, pipeline):
            yield Change("refuse", "materialization", name, wrong)
    if missing:
        check_config(name, section, connection)
        what = f"its fields are chosen once there is {', '.join(missing)}"
        yield Change("note", "materialization", name, what)
        return
    built = build(name, section, [shapes[each.collection] for each in section.bindings], connection)
    if described := built.apply(connection, dry_run=True).strip():
        yield Change("note", "materialization", name, f"its connector would: {described}")


def _never(collection: str, pipeline: Pipeline) -> str:
    """Why a collection that is not there will not be there later either; empty if it may be."""
    source = collection_name.source_of(collection, pipeline.sources)
    if source is None:
        source = collection.partition(".")[0]
        there = [*pipeline.sources]
        close = difflib.get_close_matches(source, there, n=1)
        meant = f"; did you mean {close[0]}{collection.removeprefix(source)}?" if close else ""
        return f'there is no collection "{collection}", and no source "{source}" to make it{meant}'
    section = pipeline.sources[source]
    if section.kafka is not None:
        topics = section.kafka.topics
        made = [*([f"{source}.{each}" for each in topics] or [source]), f"{source}_errors"]
    elif section.postgres is None or section.postgres.tables is None:
        return ""
    else:
        tables = section.postgres.tables
        made = [compose_name(source, each.name.schema, each.name.name) for each in tables]
    if collection in made:
        return ""
    close = difflib.get_close_matches(collection, made, n=1, cutoff=0.0)
    return f'source "{source}" makes no collection "{collection}"; did you mean {close[0]}?'


def _shapes(pipeline: Pipeline) -> Shapes:
    """What collections of the lake are, as connectors are told of them."""
    wanted = {
        each.collection
        for section in pipeline.materializations.values()
        for each in section.bindings
    }
    found = {}
    for url in storage_locations_below(pipeline.location):
        with persist.open(url, hold=False) as client:
            for name in wanted.intersection(client.state.listed()):
                state = client.state.named(name)
                if state is not None:
                    schema = state.schemas[-1]
                    section = pipeline.collections.get(name)
                    found[name] = shape_of(name, columns_of(schema), schema.key, section)
    return found


def _told(error: PenstockError) -> str:
    parts = (str(error), error.detail, error.hint)
    return " ".join(f"{each.rstrip('.')}." for each in parts if each).removesuffix(".")
