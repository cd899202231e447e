"""Materialization from the view of its runtime, with a recovery log.

The recovery log is a dictionary. That suffices to commit checkpoint and connector state together
when StartedCommit arrives. If the connector keeps the checkpoint itself, its checkpoint takes
precedence over the log.

A task also tracks the expected contents of the endpoint: every committed transaction and no other.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.materialize.connector_client import ConnectorConnection
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
    """Requested binding of a task."""

    layout: Layout = PLAIN
    delta: bool = False
    name: str = ""
    """Name of the resource; if empty, a new name is generated."""


@dataclass
class Log:
    """State of a shard in the recovery log."""

    checkpoint: bytes = b""
    state: StateUpdate = EMPTY
    stored: bytes = b""
    """Checkpoint that the endpoint has certainly committed."""

    indeterminate: tuple[bytes, Sequence[Stored]] | None = None
    """Transaction that is indeterminate: only the endpoint knows whether it committed."""


class Task:
    """Materialization with its recovery log and the expected contents of its endpoint."""

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
        self.spec = self._build_spec()

    def change(self, *resources: Resource) -> None:
        """Replace the bindings; takes effect at the next Apply."""
        self.resources = tuple(
            dataclasses.replace(resource, name=old.name)
            for resource, old in zip(resources, self.resources, strict=True)
        )
        self.version = f"v{int(self.version[1:]) + 1}"
        self.spec = self._build_spec()

    def apply(self, *, dry_run: bool = False) -> Applied:
        """Send Apply, which changes the endpoint or, with `dry_run`, describes the changes."""
        self.peer.messages.append(f"▸ Apply{' (dry run)' if dry_run else ''}")
        response = self.peer.connection.apply(Apply(self.spec, self.version, dry_run))
        self.applied = self.applied or not dry_run
        return response

    def delete(self, *, dry_run: bool = False) -> Applied:
        """Send ApplyDelete for the applied resources."""
        if not self.applied:
            return Applied()
        self.peer.messages.append(f"▸ ApplyDelete{' (dry run)' if dry_run else ''}")
        response = self.peer.connection.delete(Apply(self.spec, self.version, dry_run))
        if not dry_run:
            self.applied = False
            self.logs.clear()
            self.committed.clear()
            self._held.clear()
        return response

    def shard(
        self,
        key_range: KeyRange = WHOLE,
        *,
        connection: ConnectorConnection | None = None,
        acknowledge: bool = True,
    ) -> Shard:
        """Return an opened stream for these keys, ready to load and store."""
        shard = Shard(self, key_range, connection)
        shard.open()
        if acknowledge:
            shard.acknowledge()
        return shard

    def part(self, key_range: KeyRange) -> Shard:
        """Return a shard of some of the keys.

        Raises:
            Skipped: the connector does not support shards.
        """
        try:
            return self.shard(key_range)
        except ConnectorUnreachable:
            raise
        except ConnectorError as error:
            raise Skipped(f"the connector has no shards: {error}") from error

    def log(self, key_range: KeyRange) -> Log:
        """Return the log of a shard; a new one copies the narrowest log that covers its keys."""
        if key_range not in self.logs:
            covering = [other for other in self.logs if other.covers(key_range)]
            parent = self.logs[min(covering, key=lambda other: other.width)] if covering else Log()
            self.logs[key_range] = dataclasses.replace(parent)
        return self.logs[key_range]

    def next_checkpoint(self) -> bytes:
        """Return the checkpoint of the next transaction."""
        self._transactions += 1
        return checkpoint(self._transactions)

    def layout(self, binding: int) -> Layout:
        """Return the layout of the documents of a binding."""
        return self.resources[binding].layout

    def delta(self, binding: int) -> bool:
        """Return whether a binding uses delta updates."""
        return self.spec.bindings[binding].delta_updates

    def must_accept_empty(self) -> None:
        """Check that bindings can be truncated.

        Raises:
            Skipped: the connector does not announce it.
        """
        if not self._accepts_empty:
            raise Skipped("Validate does not announce `accepts_empty`")

    def commit(self, stored: Sequence[Stored]) -> None:
        """Record that these stores were committed."""
        for store in stored:
            held, layout = self.held(store.binding), self.layout(store.binding)
            if store.empties:
                held.update(dict.fromkeys(held))
                self.committed = [
                    earlier for earlier in self.committed if earlier.binding != store.binding
                ]
            self.committed.append(store)
            held.update((layout.key(doc), None if store.delete else doc) for doc in store.docs)

    def held(self, binding: int) -> dict[str, Document | None]:
        """Return the expected documents by key; None for a key that must not exist."""
        return self._held.setdefault(binding, {})

    def _build_spec(self) -> MaterializationSpec:
        requested = [
            ValidateBinding(
                self.peer.resource_json(resource.name, delta=resource.delta),
                resource.layout.collection(resource.name),
            )
            for resource in self.resources
        ]
        response = self.peer.validate(requested, name=self.name)
        self._accepts_empty = all(binding.accepts_empty for binding in response.bindings)
        return MaterializationSpec(
            self.name,
            self.peer.endpoint_json,
            tuple(
                MaterializationBinding(
                    binding.resource_spec_json,
                    validated.resource_path,
                    binding.collection,
                    resource.layout.selection(validated),
                    validated.delta_updates or resource.delta,
                )
                for resource, binding, validated in zip(
                    self.resources, requested, response.bindings, strict=True
                )
            ),
        )
