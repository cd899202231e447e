"""A materialization as its runtime knows it, with a recovery log.

The recovery log is a dictionary, which is enough: what matters is that checkpoint
and connector state are committed together, when StartedCommit has come, and that a
connector that keeps the checkpoint itself is believed more than the log.

A task also knows what the endpoint must hold: every transaction that committed, and
none that did not.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.materialize.client import Connection
from penstock.materialize.errors import ConnectorError, ConnectorUnreachable
from penstock.protocol.connector_state import EMPTY
from penstock.protocol.key_range import WHOLE, KeyRange
from penstock.protocol.messages import Applied, Apply, StateUpdate, ValidateBinding
from penstock.protocol.specs import MaterializationBinding, MaterializationSpec
from penstock.testing.conformance.check import Skipped
from penstock.testing.conformance.documents import PLAIN, Document, Layout
from penstock.testing.conformance.raw_messages import checkpoint
from penstock.testing.conformance.shard import Shard, Stored

if TYPE_CHECKING:
    from penstock.testing.conformance.peer import Peer

__all__ = ["Log", "Resource", "Task"]


@dataclass(frozen=True)
class Resource:
    """What a binding of a task is to be."""

    layout: Layout = PLAIN
    delta: bool = False
    name: str = ""
    """Of the resource; one of its own if empty."""


@dataclass
class Log:
    """What the recovery log knows of a shard."""

    checkpoint: bytes = b""
    state: StateUpdate = EMPTY
    stored: bytes = b""
    """The checkpoint that the endpoint is known to have committed."""

    in_doubt: tuple[bytes, Sequence[Stored]] | None = None
    """The transaction of which only the endpoint knows whether it committed."""


class Task:
    """A materialization, its recovery log, and what its endpoint must hold."""

    def __init__(self, peer: "Peer", name: str, resources: Sequence[Resource]) -> None:
        self.peer = peer
        self.name = name
        self.resources = tuple(resources)
        self.version = "v1"
        self.logs: dict[KeyRange, Log] = {}
        self.committed: list[Stored] = []
        self._held: dict[int, dict[str, Document | None]] = {}
        self.applied = False
        self._transactions = 0
        self.spec = self._built()

    def change(self, *resources: Resource) -> None:
        """Let the bindings be others; takes effect when applied."""
        self.resources = tuple(
            dataclasses.replace(each, name=old.name)
            for each, old in zip(resources, self.resources, strict=True)
        )
        self.version = f"v{int(self.version[1:]) + 1}"
        self.spec = self._built()

    def apply(self, *, dry_run: bool = False) -> Applied:
        """Make the endpoint fit, or hear what would be done."""
        self.peer.messages.append(f"▸ Apply{' (dry run)' if dry_run else ''}")
        answer = self.peer.connection.apply(Apply(self.spec, self.version, dry_run))
        self.applied = self.applied or not dry_run
        return answer

    def delete(self, *, dry_run: bool = False) -> Applied:
        """Take away what was applied."""
        if not self.applied:
            return Applied()
        self.peer.messages.append(f"▸ ApplyDelete{' (dry run)' if dry_run else ''}")
        answer = self.peer.connection.delete(Apply(self.spec, self.version, dry_run))
        if not dry_run:
            self.applied = False
            self.logs.clear()
            self.committed.clear()
            self._held.clear()
        return answer

    def shard(
        self,
        key_range: KeyRange = WHOLE,
        *,
        connection: Connection | None = None,
        acknowledge: bool = True,
    ) -> Shard:
        """A stream for these keys, opened, and ready to load and store."""
        shard = Shard(self, key_range, connection)
        shard.open()
        if acknowledge:
            shard.acknowledge()
        return shard

    def part(self, key_range: KeyRange) -> Shard:
        """A shard of some of the keys.

        Raises:
            Skipped: the connector has none.
        """
        try:
            return self.shard(key_range)
        except ConnectorUnreachable:
            raise
        except ConnectorError as error:
            raise Skipped(f"the connector has no shards: {error}") from error

    def log(self, key_range: KeyRange) -> Log:
        """The log of a shard; a new one goes on from the narrowest that has its keys."""
        if key_range not in self.logs:
            covering = [each for each in self.logs if each.covers(key_range)]
            parent = self.logs[min(covering, key=lambda each: each.width)] if covering else Log()
            self.logs[key_range] = dataclasses.replace(parent)
        return self.logs[key_range]

    def next_checkpoint(self) -> bytes:
        """That of the next transaction."""
        self._transactions += 1
        return checkpoint(self._transactions)

    def layout(self, binding: int) -> Layout:
        """What documents of a binding are made of."""
        return self.resources[binding].layout

    def delta(self, binding: int) -> bool:
        """Whether a binding takes delta updates."""
        return self.spec.bindings[binding].delta_updates

    def must_accept_empty(self) -> None:
        """See that bindings can be emptied.

        Raises:
            Skipped: nobody said so.
        """
        if not self._accepts_empty:
            raise Skipped("Validate does not announce `accepts_empty`")

    def commit(self, stored: Sequence[Stored]) -> None:
        """Note that these were committed."""
        for each in stored:
            held, layout = self.held(each.binding), self.layout(each.binding)
            if each.empties:
                held.update(dict.fromkeys(held))
                self.committed = [kept for kept in self.committed if kept.binding != each.binding]
            self.committed.append(each)
            held.update((layout.key(doc), None if each.delete else doc) for doc in each.docs)

    def held(self, binding: int) -> dict[str, Document | None]:
        """What must be there by key; none where it must not be."""
        return self._held.setdefault(binding, {})

    def _built(self) -> MaterializationSpec:
        asked = [
            ValidateBinding(
                self.peer.resource_json(each.name, delta=each.delta),
                each.layout.collection(each.name),
            )
            for each in self.resources
        ]
        validated = self.peer.ask(asked, name=self.name)
        self._accepts_empty = all(each.accepts_empty for each in validated.bindings)
        return MaterializationSpec(
            self.name,
            self.peer.endpoint_json,
            tuple(
                MaterializationBinding(
                    binding.resource_spec_json,
                    answer.resource_path,
                    binding.collection,
                    each.layout.selection(answer),
                    answer.delta_updates or each.delta,
                )
                for each, binding, answer in zip(
                    self.resources, asked, validated.bindings, strict=True
                )
            ),
        )
