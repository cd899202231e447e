"""The recovery log: what a materialization must know after any crash.

One entry each, in its storage location, in this order:

    applied      a specification, and how keys are shared out
    planned      the upper of the next transaction, and the bindings that it leaves out, before
                 its first Store
    committed    what every shard's connector answered, and by which session; often
                 with the plan of the transaction that follows
    settled      up to where all shards have acknowledged

A planned transaction is finished before any other is planned: on a store without
transactions a part of it may be there already, and only the very same interval
makes it whole. How keys are shared out changes only at one common frontier.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, Final

from penstock.errors import InternalError, UsageError
from penstock.materialize.checkpoint import Checkpoint, Reached, decode, encode
from penstock.protocol.connector_state import combine_state
from penstock.protocol.key_range import KeyRange
from penstock.protocol.messages import StateUpdate

__all__ = ["Log", "ShardLog", "notes_of", "recalled"]

HASH: Final = "xxh64 with seed 0, high 32 bits, of the packed key"


@dataclass(frozen=True, slots=True)
class ShardLog:
    """What is known of one range of keys."""

    key_range: KeyRange
    checkpoint: Checkpoint | None = None
    """The last that was committed; None before the first."""

    state_json: str = "{}"
    """Connector state."""

    session: str = ""
    """Whose commit it was: only that one may be acknowledged."""

    settled: Checkpoint | None = None
    """The last that was acknowledged: what came after may have to be read again."""


@dataclass(frozen=True, slots=True)
class Log:
    """What is known of a materialization."""

    version: str
    """Of the specification that was applied."""

    shards: tuple[ShardLog, ...]
    planned: int | None = None
    """The upper of a transaction that may have begun."""

    frozen: frozenset[str] = frozenset()
    """Resources that the planned transaction leaves out: their collections were in error."""

    unbound: frozenset[str] = frozenset()
    """Resources that were bound, and are not or were not lately. What was planned for them may
    be there in part, and who dropped or changed them since is not known."""

    def bind(self, version: str, bound: Collection[str]) -> "Log":
        """A specification was applied that has these resources."""
        known = {
            path
            for each in self.shards
            if each.checkpoint is not None
            for path in each.checkpoint.bindings
        }
        return replace(self, version=version, unbound=self.unbound | known.difference(bound))

    def doubt(self, paths: Collection[str]) -> "Log":
        """What these resources hold is not known any more."""
        return replace(self, unbound=self.unbound.union(paths))

    def plan(self, upper: int, frozen: Collection[str] = ()) -> "Log":
        """Before a transaction begins."""
        return replace(self, planned=upper, frozen=frozenset(frozen))

    def commit(
        self,
        shards: Sequence[ShardLog],
        *,
        planned: int | None = None,
        frozen: Collection[str] = (),
        written: Collection[str] = (),
    ) -> "Log":
        """Every shard has committed, or had nothing to do; `planned` follows, without `frozen`.

        Of the resources that are `written` it is known again what they hold.
        """
        settled = {each.key_range: each.settled for each in self.shards}
        committed = [replace(each, settled=settled[each.key_range]) for each in shards]
        unbound = self.unbound.difference(written)
        return replace(
            self,
            shards=tuple(committed),
            planned=planned,
            frozen=frozenset(frozen),
            unbound=unbound,
        )

    def opened(self, key_range: KeyRange, checkpoint: Checkpoint) -> "Log":
        """A shard's endpoint holds something else than was written down, and it counts."""
        return self._each(
            lambda shard: (
                replace(shard, checkpoint=checkpoint) if shard.key_range == key_range else shard
            )
        )

    def settle(self) -> "Log":
        """All commits are acknowledged."""
        return self._each(lambda shard: replace(shard, settled=shard.checkpoint))

    @property
    def is_settled(self) -> bool:
        """Whether all commits are known to be acknowledged."""
        return all(each.settled == each.checkpoint for each in self.shards)

    def share_out(self, ranges: Sequence[KeyRange], bound: Collection[str]) -> "Log":
        """Give every key to one of `ranges`, where all shards have come to one frontier.

        That is in what is `bound`; other resources may be anywhere.
        A shard inherits the connector state of those whose keys it takes over.
        """
        reached = self.shards[0].checkpoint
        frontiers = [_of(each.checkpoint, bound) for each in self.shards]
        if self.planned is not None or any(each != frontiers[0] for each in frontiers):
            raise InternalError("keys were shared out between two frontiers")
        return replace(
            self,
            shards=tuple(
                ShardLog(each, reached, self._inherited(each), settled=reached) for each in ranges
            ),
        )

    def _inherited(self, key_range: KeyRange) -> str:
        states = [
            StateUpdate(each.state_json.encode(), patch=True)
            for each in self.shards
            if each.key_range.overlaps(key_range)
        ]
        return (reduce(combine_state, states, StateUpdate(b"{}")).json or b"{}").decode()

    def _each(self, change: Callable[[ShardLog], ShardLog]) -> "Log":
        return replace(self, shards=tuple(map(change, self.shards)))


def notes_of(log: Log) -> Mapping[str, Any]:
    """The log as notes, one for each shard and one for the rest."""
    return {
        "materialization": {
            "version": log.version,
            "planned": log.planned,
            "frozen": sorted(log.frozen),
            "hash": HASH,
            "unbound": sorted(log.unbound),
        },
        **{
            f"shard {each.key_range}": {
                "begin": each.key_range.begin,
                "end": each.key_range.end,
                "checkpoint": _written(each.checkpoint),
                "state": each.state_json,
                "session": each.session,
                "settled": _written(each.settled),
            }
            for each in log.shards
        },
    }


def recalled(notes: Mapping[str, Any]) -> Log | None:
    """The log that is in the notes, if one is."""
    whole = notes.get("materialization")
    if whole is None:
        return None
    if whole["hash"] != HASH:
        raise UsageError(
            "keys of this materialization were shared out by another hash",
            detail=f"It was {whole['hash']}; now it is {HASH}.",
            hint="Use the release that wrote it, or give the materialization another name.",
        )
    shards = [
        ShardLog(
            KeyRange(each["begin"], each["end"]),
            _read(each["checkpoint"]),
            each["state"],
            each["session"],
            _read(each["settled"]),
        )
        for name, each in notes.items()
        if name.startswith("shard ")
    ]
    shards.sort(key=lambda each: each.key_range)
    return Log(
        whole["version"],
        tuple(shards),
        whole["planned"],
        # Earlier releases left out what was in error, and did not write it down.
        frozenset(whole.get("frozen", ())),
        frozenset(whole["unbound"]),
    )


def _of(checkpoint: Checkpoint | None, bound: Collection[str]) -> Mapping[str, Reached] | None:
    if checkpoint is None:
        return None
    return {path: each for path, each in checkpoint.bindings.items() if path in bound}


def _written(checkpoint: Checkpoint | None) -> str | None:
    return None if checkpoint is None else encode(checkpoint).decode()


def _read(text: str | None) -> Checkpoint | None:
    return None if text is None else decode(text.encode(), connector="(recovery log)")
