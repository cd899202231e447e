"""Tools of a check: connections to the connector, and tasks.

A check acts as a runtime. The streams and resources that it creates are removed at its end.
"""

import dataclasses
import json
import threading
from collections.abc import Sequence
from typing import Any

from penstock.clock import SYSTEM_CLOCK
from penstock.errors import PenstockError
from penstock.materialize.connector_client import ConnectorConnection
from penstock.protocol.messages import Validate, ValidateBinding, Validated
from penstock.testing.conformance.check import Failed, Need, Skipped
from penstock.testing.conformance.config import EXACTLY_ONCE, Config, Pattern, filled
from penstock.testing.conformance.documents import render
from penstock.testing.conformance.exchange import Exchange
from penstock.testing.conformance.process import Connectors
from penstock.testing.conformance.task import Resource, Task

__all__ = ["Peer", "delta_task"]


class Peer:
    """Tools of a check."""

    def __init__(self, connectors: Connectors, prefix: str) -> None:
        self.connectors = connectors
        self.config: Config = connectors.config
        self.messages: list[str] = []
        """Messages sent and received, in order."""

        self.notes: list[str] = []
        """Parts that could not be inspected."""

        self._prefix = prefix
        self._name_count = 0
        self._tasks: list[Task] = []
        self._exchanges: list[Exchange] = []

    @property
    def connection(self) -> ConnectorConnection:
        """Connection to the connector."""
        return self.connectors.connection()

    @property
    def exact(self) -> bool:
        """Return whether each transaction takes effect exactly once."""
        return self.config.pattern in EXACTLY_ONCE

    @property
    def remote(self) -> bool:
        """Return whether the endpoint stores the checkpoint."""
        return self.config.pattern is Pattern.REMOTE_AUTHORITATIVE

    @property
    def endpoint_json(self) -> str:
        """Endpoint configuration as JSON."""
        return json.dumps(self.config.endpoint)

    def render(self, value: Any) -> str:
        """Return a value for a message, without secrets and at most one line long."""
        return render(value, self.connectors.hide)

    def new_name(self) -> str:
        """Return an unused name."""
        self._name_count += 1
        return f"{self._prefix}_{self._name_count}"

    def resource_json(self, name: str, *, delta: bool = False) -> str:
        """Return the resource configuration of this name as JSON."""
        template = self.config.delta_resource if delta else None
        return json.dumps(filled(template or self.config.resource, name=name))

    def exchange(
        self, *, checked: bool = True, connection: ConnectorConnection | None = None
    ) -> Exchange:
        """Return a new stream, before its first message."""
        stream = (connection or self.connection).transactions(checked=checked)
        number = len(self._exchanges) + 1
        exchange = Exchange(
            stream,
            self.config.patience_s,
            lambda line: self.messages.append(f"stream {number} {line}"),
        )
        self._exchanges.append(exchange)
        return exchange

    def task(self, *resources: Resource, apply: bool = True) -> Task:
        """Return a new materialization, validated and, unless `apply` is false, applied."""
        named = [
            dataclasses.replace(resource, name=resource.name or self.new_name())
            for resource in resources or (Resource(),)
        ]
        task = Task(self, f"conformance/{self.new_name()}", named)
        self._tasks.append(task)
        if apply:
            task.apply()
        return task

    def validate(
        self, bindings: Sequence[ValidateBinding], endpoint_json: str = "", name: str = ""
    ) -> Validated:
        """Send Validate with these bindings of the materialization `name`.

        Raises:
            Failed: the response has another number of bindings.
        """
        self.messages.append(f"▸ Validate of {len(bindings)} bindings")
        name = name or f"conformance/{self._prefix}"
        response = self.connection.validate(
            Validate(name, endpoint_json or self.endpoint_json, tuple(bindings))
        )
        if len(response.bindings) != len(bindings):
            raise Failed(f"Validated has {len(response.bindings)} bindings for {len(bindings)}")
        return response

    def second_connection(self) -> ConnectorConnection:
        """Return a connection to a second process with the same endpoint."""
        self.messages.append("▸ connect to a second process")
        return self.connectors.second_connection()

    def kill(self) -> None:
        """Kill the connector; the next message starts it again."""
        self.messages.append("▸ kill -9")
        self.connectors.kill()

    def pause(self) -> None:
        """Wait until the connector has probably processed messages that have no response."""
        SYSTEM_CLOCK.wait(threading.Event(), round(self.config.settle_s * 1_000))

    def note(self, text: str) -> None:
        """Record a part that a passing check did not inspect."""
        if text not in self.notes:
            self.notes.append(text)

    def close(self) -> None:
        """End the streams, and delete the applied resources as far as possible."""
        for exchange in self._exchanges:
            exchange.close()
        for task in self._tasks:
            try:
                task.delete()
            except PenstockError:
                return  # Resources of an unreachable connector cannot be deleted.


def delta_task(peer: Peer, *others: Resource) -> Task:
    """Return a task whose first binding uses delta updates and can be read.

    Raises:
        Skipped: there is no such binding, or no `read`.
    """
    if not peer.config.read:
        raise Skipped(Need.READ.value)
    if not peer.config.delta and peer.config.pattern is not Pattern.PUSH_ONLY:
        raise Skipped(Need.DELTA.value)
    try:
        return peer.task(Resource(delta=True), *others)
    except PenstockError as error:
        if peer.config.delta_resource is not None:
            raise
        raise Skipped(
            f"a delta binding of `resource` is rejected ({error}), and there is no `delta_resource`"
        ) from error
