"""Progress of the resources of a materialization, from its recovery log. Pure functions.

checkpoint frontier    a resource holds all changes of its collection below this time
0                      all rows of the resource are to be stored again
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from penstock.materialize.checkpoint import Checkpoint
from penstock.materialize.recovery_log import RecoveryLog, ShardLog

__all__ = ["Progress", "RequestedResource", "resource_frontier"]


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
