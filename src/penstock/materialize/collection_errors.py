"""Errors of bound collections: freeze their bindings, or stop the materialization."""

from collections.abc import Mapping

from penstock.errors import DefiniteError
from penstock.materialize.inputs import Readiness
from penstock.materialize.progress import resource_frontier
from penstock.materialize.recovery_log import RecoveryLog
from penstock.materialize.spec_builder import IncompatibleCollection
from penstock.persist.records import ErrorSpan
from penstock.pipeline.file import MaterializationSection
from penstock.progress.time import describe_time
from penstock.telemetry import fields, logger

__all__ = ["StoppedByError", "log_degraded", "replaced_frontier", "stopping_error"]

log = logger("materialize")


class StoppedByError(DefiniteError):
    """A bound collection is in error, and `on_error: stop` applies."""


def stopping_error(materialization: str, ready: Readiness, reached: int) -> StoppedByError | None:
    """Return the error that stops a materialization with `on_error: stop` now, or None."""
    for name, span in ready.errored:
        if span.lower <= reached or not ready.upper:
            stored = span.error
            return StoppedByError(
                f'materialization "{materialization}" has stopped at '
                f'{describe_time(span.lower)}: collection "{name}" is in error: {stored.message}',
                detail=stored.detail,
                hint=f"{stored.hint} The materialization resumes when the error ends. To "
                "continue without this collection, set on_error: leave_behind.".strip(),
            )
    return None


def replaced_frontier(
    section: MaterializationSection, recovery_log: RecoveryLog, error: IncompatibleCollection
) -> int | None:
    """Return the freeze frontier of the bindings of a replaced collection.

    Return None if they cannot freeze: errors stop all bindings, a planned transaction includes
    one of them, or a resource holds no rows.
    """
    planned = recovery_log.planned is not None
    if section.on_error != "leave_behind" or (
        planned and not recovery_log.frozen.issuperset(error.paths)
    ):
        return None
    backfills = [
        binding.backfill for binding in section.bindings if binding.collection == error.collection
    ]
    frontier = min(
        resource_frontier(shard.checkpoint, path, backfill)
        for path, backfill in zip(error.paths, backfills, strict=True)
        for shard in recovery_log.shards
    )
    return frontier or None


def log_degraded(
    materialization: str, before: Mapping[str, ErrorSpan], after: Mapping[str, ErrorSpan]
) -> None:
    """Log the start and the end of errors of collections whose bindings are frozen."""
    for name, span in after.items():
        if before.get(name) != span:
            log.warning(
                "materialization degraded",
                extra=fields(
                    materialization=materialization,
                    collection=name,
                    time=span.lower,
                    error=span.error.message,
                    hint=span.error.hint,
                ),
            )
    for name in before.keys() - after.keys():
        log.info("binding resumes", extra=fields(materialization=materialization, collection=name))
