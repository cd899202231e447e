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
    """Recovery state of one shard."""

    key_range: KeyRange
    checkpoint: Checkpoint | None = None
    """Last committed checkpoint; None before the first commit."""

    state_json: str = "{}"
    """Connector state."""

    session: str = ""
    """Session of the last commit. Only this session may acknowledge the commit."""

    settled: Checkpoint | None = None
    """Last acknowledged checkpoint. Changes after it may have to be read again."""


@dataclass(frozen=True, slots=True)
class Log:
    """Recovery state of a materialization."""

    version: str
    """Version of the applied specification."""

    shards: tuple[ShardLog, ...]
    planned: int | None = None
    """Upper of a transaction that may have begun."""

    frozen: frozenset[str] = frozenset()
    """Resources that the planned transaction omits, because their collections were in error."""

    unbound: frozenset[str] = frozenset()
    """Resources with unknown contents: bound earlier, and unbound now or until recently.

    A planned transaction may be stored in part, and others may have changed or dropped them.
    """

    def bind(self, version: str, bound: Collection[str]) -> "Log":
        """Record the application of a specification that binds these resources."""
        known = {
            path
            for each in self.shards
            if each.checkpoint is not None
            for path in each.checkpoint.bindings
        }
        return replace(self, version=version, unbound=self.unbound | known.difference(bound))

    def doubt(self, paths: Collection[str]) -> "Log":
        """Record that the contents of these resources are unknown."""
        return replace(self, unbound=self.unbound.union(paths))

    def plan(self, upper: int, frozen: Collection[str] = ()) -> "Log":
        """Record the plan of a transaction, before the transaction begins."""
        return replace(self, planned=upper, frozen=frozenset(frozen))

    def commit(
        self,
        shards: Sequence[ShardLog],
        *,
        planned: int | None = None,
        frozen: Collection[str] = (),
        written: Collection[str] = (),
    ) -> "Log":
        """Record that every shard has committed, or had no changes to store.

        `planned` and `frozen` are the plan of the next transaction. The contents of the resources
        in `written` are known again.
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
        """Set the checkpoint of a shard to its endpoint's checkpoint, which takes precedence."""
        return self._each(
            lambda shard: (
                replace(shard, checkpoint=checkpoint) if shard.key_range == key_range else shard
            )
        )

    def settle(self) -> "Log":
        """Record that all commits are acknowledged."""
        return self._each(lambda shard: replace(shard, settled=shard.checkpoint))

    @property
    def is_settled(self) -> bool:
        """Return whether all commits are known to be acknowledged."""
        return all(each.settled == each.checkpoint for each in self.shards)

    def share_out(self, ranges: Sequence[KeyRange], bound: Collection[str]) -> "Log":
        """Replace the shards by shards with the key ranges `ranges`.

        All shards must be at the same frontier in every resource in `bound`; other resources may
        be at any frontier. A new shard inherits the connector state of all shards whose key range
        overlaps its own.
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
    """Return the state entries of a log: one for each shard, and one for the common fields."""
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
    """Return the log that the state entries contain, or None.

    Raises:
        UsageError: another release hashed the keys differently.
    """
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
        # Earlier releases omitted errored collections without a record of them.
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
