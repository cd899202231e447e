"""Recovery log: the state of a materialization that must survive any crash.

The storage location of the materialization receives one entry per event, in this order:

    applied      a specification, and the key ranges of the shards
    planned      the upper of the next transaction and the bindings that it omits; written
                 before its first Store
    committed    the answer of every shard's connector, and its session; often together
                 with the plan of the next transaction
    settled      the checkpoints that all shards have acknowledged

A planned transaction is completed before another one is planned. An endpoint without
transactions may already hold a part of it, and only the identical interval completes that part.
Key ranges change only when all shards are at a common frontier.

The frontier of a resource follows from the checkpoints in the log. The resource holds all changes
of its collection below it; at 0, all rows of the resource are to be stored again.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, Final

from penstock.errors import InternalError, UsageError
from penstock.materialize.checkpoint import Checkpoint, ResourceProgress, decode, encode
from penstock.protocol.connector_state import combine_state
from penstock.protocol.key_range import KeyRange
from penstock.protocol.messages import StateUpdate

__all__ = [
    "Progress",
    "RecoveryLog",
    "RequestedResource",
    "ShardLog",
    "from_entries",
    "resource_frontier",
    "to_entries",
]

HASH: Final = "xxh64 with seed 0, high 32 bits, of the packed key"


@dataclass(frozen=True, slots=True)
class ShardLog:
    """Recovery state of one shard."""

    key_range: KeyRange
    checkpoint: Checkpoint | None = None
    """Last committed checkpoint; None before the first commit."""

    state_json: str = "{}"
    """Connector state."""

    session: str = ""
    """ConnectorSession of the last commit. Only this session may acknowledge the commit."""

    acknowledged: Checkpoint | None = None
    """Last acknowledged checkpoint. Changes after it may have to be read again."""

    @property
    def has_connector_state(self) -> bool:
        """True if the connector has stored state with its last commit."""
        return self.state_json not in ("", "{}")


@dataclass(frozen=True, slots=True)
class RecoveryLog:
    """Recovery state of a materialization."""

    version: str
    """Version of the applied specification."""

    shards: tuple[ShardLog, ...]
    planned: int | None = None
    """Upper of a transaction that may have begun."""

    frozen: frozenset[str] = frozenset()
    """Resources that the planned transaction omits, because their collections were in error."""

    unknown: frozenset[str] = frozenset()
    """Resources with unknown contents: bound earlier, and unbound now or until recently.

    A planned transaction may be stored in part, and others may have changed or dropped them.
    """

    def bind(self, version: str, bound: Collection[str]) -> "RecoveryLog":
        """Record the application of a specification that binds these resources."""
        known = {
            path
            for shard in self.shards
            if shard.checkpoint is not None
            for path in shard.checkpoint.bindings
        }
        return replace(self, version=version, unknown=self.unknown | known.difference(bound))

    def mark_unknown(self, paths: Collection[str]) -> "RecoveryLog":
        """Record that the contents of these resources are unknown."""
        return replace(self, unknown=self.unknown.union(paths))

    def plan(self, upper: int, frozen: Collection[str] = ()) -> "RecoveryLog":
        """Record the plan of a transaction, before the transaction begins."""
        return replace(self, planned=upper, frozen=frozenset(frozen))

    def commit(
        self,
        shards: Sequence[ShardLog],
        *,
        planned: int | None = None,
        frozen: Collection[str] = (),
        written: Collection[str] = (),
    ) -> "RecoveryLog":
        """Record that every shard has committed, or had no changes to store.

        `planned` and `frozen` are the plan of the next transaction. The contents of the resources
        in `written` are known again.
        """
        acknowledged = {shard.key_range: shard.acknowledged for shard in self.shards}
        committed = [replace(shard, acknowledged=acknowledged[shard.key_range]) for shard in shards]
        unknown = self.unknown.difference(written)
        return replace(
            self,
            shards=tuple(committed),
            planned=planned,
            frozen=frozenset(frozen),
            unknown=unknown,
        )

    def adopt_checkpoint(self, key_range: KeyRange, checkpoint: Checkpoint) -> "RecoveryLog":
        """Set the checkpoint of a shard to its endpoint's checkpoint, which takes precedence."""
        return self._map_shards(
            lambda shard: (
                replace(shard, checkpoint=checkpoint) if shard.key_range == key_range else shard
            )
        )

    def acknowledge(self) -> "RecoveryLog":
        """Record that all commits are acknowledged."""
        return self._map_shards(lambda shard: replace(shard, acknowledged=shard.checkpoint))

    @property
    def is_acknowledged(self) -> bool:
        """Return whether all commits are known to be acknowledged."""
        return all(shard.acknowledged == shard.checkpoint for shard in self.shards)

    def rebalance(self, ranges: Sequence[KeyRange], bound: Collection[str]) -> "RecoveryLog":
        """Replace the shards by shards with the key ranges `ranges`.

        All shards must be at the same frontier in every resource in `bound`; other resources may
        be at any frontier. A new shard inherits the connector state of all shards whose key range
        overlaps its own.
        """
        reached = self.shards[0].checkpoint
        frontiers = [_of(shard.checkpoint, bound) for shard in self.shards]
        if self.planned is not None or any(frontier != frontiers[0] for frontier in frontiers):
            raise InternalError("key ranges changed while shards were at different frontiers")
        return replace(
            self,
            shards=tuple(
                ShardLog(key_range, reached, self._inherited(key_range), acknowledged=reached)
                for key_range in ranges
            ),
        )

    def _inherited(self, key_range: KeyRange) -> str:
        states = [
            StateUpdate(shard.state_json.encode(), patch=True)
            for shard in self.shards
            if shard.key_range.overlaps(key_range)
        ]
        return (reduce(combine_state, states, StateUpdate(b"{}")).json or b"{}").decode()

    def _map_shards(self, change: Callable[[ShardLog], ShardLog]) -> "RecoveryLog":
        return replace(self, shards=tuple(map(change, self.shards)))


def to_entries(log: RecoveryLog) -> Mapping[str, Any]:
    """Return the state entries of a log: one for each shard, and one for the common fields."""
    return {
        "materialization": {
            "version": log.version,
            "planned": log.planned,
            "frozen": sorted(log.frozen),
            "hash": HASH,
            "unbound": sorted(log.unknown),
        },
        **{
            f"shard {shard.key_range}": {
                "begin": shard.key_range.begin,
                "end": shard.key_range.end,
                "checkpoint": _encode(shard.checkpoint),
                "state": shard.state_json,
                "session": shard.session,
                "settled": _encode(shard.acknowledged),
            }
            for shard in log.shards
        },
    }


def from_entries(entries: Mapping[str, Any]) -> RecoveryLog | None:
    """Return the log that the state entries contain, or None.

    Raises:
        UsageError: another release hashed the keys differently.
    """
    common = entries.get("materialization")
    if common is None:
        return None
    if common["hash"] != HASH:
        raise UsageError(
            "keys of this materialization have another hash",
            detail=f"The recovery log has {common['hash']}; this release uses {HASH}.",
            hint="Use the release that wrote the log, or give the materialization another name.",
        )
    shards = [
        ShardLog(
            KeyRange(entry["begin"], entry["end"]),
            _decode(entry["checkpoint"]),
            entry["state"],
            entry["session"],
            _decode(entry["settled"]),
        )
        for name, entry in entries.items()
        if name.startswith("shard ")
    ]
    shards.sort(key=lambda shard: shard.key_range)
    return RecoveryLog(
        common["version"],
        tuple(shards),
        common["planned"],
        # Earlier releases omitted errored collections without a record of them.
        frozenset(common.get("frozen", ())),
        frozenset(common["unbound"]),
    )


def _of(
    checkpoint: Checkpoint | None, bound: Collection[str]
) -> Mapping[str, ResourceProgress] | None:
    if checkpoint is None:
        return None
    return {path: progress for path, progress in checkpoint.bindings.items() if path in bound}


def _encode(checkpoint: Checkpoint | None) -> str | None:
    return None if checkpoint is None else encode(checkpoint).decode()


def _decode(text: str | None) -> Checkpoint | None:
    return None if text is None else decode(text.encode(), connector="(recovery log)")


# Progress of the resources.


@dataclass(frozen=True, slots=True)
class RequestedResource:
    """A resource in the state that the pipeline file requests."""

    path: str
    collection: str
    """Name of the collection that is bound to the resource."""

    backfill: int
    layouts: frozenset[str] | None
    """Ids of the layouts whose rows need no rewrite; None if any layout needs none."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Frontiers of the requested resources in all shards."""

    log: RecoveryLog
    resources: tuple[RequestedResource, ...]

    def committed(self) -> int:
        """Return the upper of the last committed transaction."""
        return max(
            resource_frontier(shard.checkpoint, resource.path)
            for shard in self.log.shards
            for resource in self.resources
        )

    def reached(self, frozen: Collection[str]) -> int:
        """Return the lowest frontier of all resources whose collection is not in `frozen`.

        If all are frozen, return the upper of the last committed transaction.
        """
        frontiers = [
            self._frontier(shard, resource)
            for resource in self.resources
            if resource.collection not in frozen
            for shard in self.log.shards
        ]
        return min(frontiers, default=self.committed())

    def acknowledged(self, resource: RequestedResource) -> int:
        """Return the lowest frontier of a resource that the shards have acknowledged."""
        return min(
            resource_frontier(shard.acknowledged, resource.path) for shard in self.log.shards
        )

    def by_collection(self, committed: int = 0) -> Mapping[str, int]:
        """Return the lowest frontier of the resources of each collection.

        With `committed`, assume that the planned transaction is committed up to that upper.
        """
        frontiers: dict[str, int] = {}
        for resource in self.resources:
            # SUBTLE: ignore the layout. A frozen binding with a changed layout waits for the end
            # of the error. Below the error its rows still have the old layout.
            frontier = min(
                resource_frontier(shard.checkpoint, resource.path, resource.backfill)
                for shard in self.log.shards
            )
            if resource.path in self.log.unknown:
                frontier = 0
            if resource.path not in self.log.frozen:
                frontier = max(frontier, committed)
            name = resource.collection
            frontiers[name] = min(frontier, frontiers.get(name, frontier))
        return frontiers

    def paths_of(self, collections: Collection[str]) -> frozenset[str]:
        """Return the paths of the resources of these collections."""
        return frozenset(
            resource.path for resource in self.resources if resource.collection in collections
        )

    def _frontier(self, shard: ShardLog, resource: RequestedResource) -> int:
        if resource.path in self.log.unknown:
            return 0
        return resource_frontier(
            shard.checkpoint, resource.path, resource.backfill, resource.layouts
        )


def resource_frontier(
    checkpoint: Checkpoint | None,
    path: str,
    backfill: int = 0,
    layouts: Collection[str] | None = None,
) -> int:
    """Return the frontier of a resource, or 0 if all of its rows are to be stored again.

    All rows are stored again if the stored backfill is below `backfill`, or if the stored layout
    is not in `layouts`.
    """
    progress = checkpoint.bindings.get(path) if checkpoint is not None else None
    if progress is None or progress.backfill < backfill:
        return 0
    if layouts is not None and progress.layout not in layouts:
        return 0
    return progress.frontier
