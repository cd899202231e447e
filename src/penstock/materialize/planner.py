"""Plan of the next transaction: its upper, and the work of each shard. Pure functions."""

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress

from penstock.errors import UsageError
from penstock.materialize.binding_kind import BindingPlan
from penstock.materialize.checkpoint import NOTHING
from penstock.materialize.inputs import ClaimedCollection, Readiness
from penstock.materialize.intervals import limit_upper, missing_interval
from penstock.materialize.progress import Progress
from penstock.materialize.recovery_log import RecoveryLog
from penstock.materialize.shard import ShardPlan
from penstock.materialize.shard_transaction import needs_truncation
from penstock.materialize.spec_builder import BuiltSpec
from penstock.persist.records import CollectionState
from penstock.pipeline.file import MaterializationSection
from penstock.protocol.transport_security import Security

__all__ = ["next_upper", "plan_bindings", "plan_shards", "truncated_resources"]


def next_upper(
    progress: Progress,
    ready: Readiness,
    states: Sequence[CollectionState],
    *,
    reached: int,
    size: int,
) -> int | None:
    """Return the upper of the next transaction; None if no collection has advanced.

    `states` are the collections that are not frozen. `size` limits the bytes to read.
    """
    if ready.upper <= reached:
        return None
    if reached:
        # A binding that resumes reaches the frontier of the others in one transaction.
        reached = max(reached, min(progress.committed(), ready.upper))
    return limit_upper(states, reached, ready.upper, size)


def plan_bindings(
    section: MaterializationSection,
    built: BuiltSpec,
    log: RecoveryLog,
    claimed: Mapping[str, ClaimedCollection],
    *,
    frozen: Collection[str],
    continued: Sequence[frozenset[str]],
) -> tuple[BindingPlan, ...]:
    """Return the inputs of each binding.

    `frozen` are the resources that the transaction leaves out. `continued` are, for each
    binding, the ids of earlier layouts that need no rewrite.
    """
    # A transaction may truncate only if one shard runs, and the file requests one.
    one_shard = len(log.shards) == section.shards == 1
    bindings = []
    for number, binding in enumerate(section.bindings):
        path, collection = built.path(number), claimed[binding.collection]
        bound = collection.bind(
            path,
            binding.backfill,
            built.columns(number),
            unknown=path in log.unknown,
            truncates=built.empties[number] and one_shard,
            layout=built.layout_ids[number],
            continued=continued[number],
            frozen=path in frozen,
        )
        _, kind = built.described[number]
        bindings.append(
            BindingPlan(
                bound,
                collection.url,
                collection.state,
                kind,
                deletes=built.deletes[number],
                empties=built.empties[number],
            )
        )
    return tuple(bindings)


def plan_shards(
    built: BuiltSpec,
    log: RecoveryLog,
    bindings: tuple[BindingPlan, ...],
    upper: int,
    *,
    materialization: str,
    address: str,
    security: Security,
    session: str,
) -> list[ShardPlan]:
    """Return the plan of each shard for the transaction up to `upper`.

    `materialization` is the id of the recovery log.
    """
    return [
        ShardPlan(
            materialization,
            built.spec,
            built.version,
            shard,
            bindings,
            upper,
            address,
            security,
            session,
        )
        for shard in log.shards
    ]


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
