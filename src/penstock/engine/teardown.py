"""Drops of objects that no process runs, from their definitions in the catalog."""

import os
from collections.abc import Mapping, Sequence

from penstock import persist
from penstock.catalog import Object, hides_secrets
from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.durable import join
from penstock.errors import UsageError
from penstock.ingest import drop as drop_source
from penstock.ingest import source_of
from penstock.materialize.teardown import drop as drop_materialization
from penstock.persist.state_store import StateStore
from penstock.pipeline import Pipeline, UnsetVariable, substitute
from penstock.sources.source import TableSelection
from penstock.supervisor import writer_id

__all__ = ["drop_object", "drop_removed_tables"]


def drop_object(
    known: Object,
    location: str,
    *,
    writer: str,
    keep_target: bool = False,
    clock: Clock = SYSTEM_CLOCK,
    environment: Mapping[str, str] | None = None,
) -> None:
    """Drop a source or a materialization as the catalog defines it.

    Raises:
        UsageError: a secret or an environment variable of its definition is missing.
    """
    alone = _alone(known, location, os.environ if environment is None else environment)
    with persist.open(join(location, known.name), writer=writer) as client:
        if known.type == "source":
            section = alone.sources[known.name]
            drop_source(client, known.name, source_of(known.name, section, location, clock))
        else:
            drop_materialization(
                known.name,
                alone.materializations[known.name],
                client,
                location,
                clock=clock,
                keep_target=keep_target,
            )


def drop_removed_tables(name: str, pipeline: Pipeline, *, clock: Clock) -> None:
    """Drop the collections of tables that a source of the file no longer names."""
    source = source_of(name, pipeline.sources[name], pipeline.location, clock)
    if not isinstance(source, TableSelection):
        return
    with persist.open(join(pipeline.location, name), writer=writer_id(pipeline)) as client:
        source.drop_removed(StateStore(client, name), lambda names: _destroy(client, names))


def _destroy(client: persist.Client, names: Sequence[str]) -> None:
    client.destroy(*names)


def _alone(known: Object, location: str, environment: Mapping[str, str]) -> Pipeline:
    """Return a pipeline that contains this object only."""
    what = f'{known.type} "{known.name}" cannot be dropped'
    if known.type == "source" and "kafka" in known.definition:
        # A Kafka source creates nothing upstream, so a drop needs neither secrets nor files.
        unused = {"kafka": {"brokers": "unused", "topic": "none", "format": "bytes"}}
        return Pipeline.model_validate({"location": location, "sources": {known.name: unused}})
    if hides_secrets(known.definition):
        raise UsageError(
            what,
            detail="Its definition contained a secret, and the catalog does not store secrets.",
            hint="Put it back into the file, start it with penstock up, and then run: "
            f"penstock drop LOCATION {known.name}. Give secrets as ${{NAME}}.",
        )
    missing: list[UnsetVariable] = []
    section = substitute(known.definition, environment, missing)
    if missing:
        raise UsageError(
            what,
            detail=f"Its definition uses ${{{missing[0].name}}}, which is not set.",
            hint=f"Set it in the environment: export {missing[0].name}=…",
        )
    return Pipeline.model_validate({"location": location, f"{known.type}s": {known.name: section}})
