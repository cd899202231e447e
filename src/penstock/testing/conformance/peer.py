"""What a check has to work with: lines to the connector, and tasks.

A check speaks as a runtime would. Whatever it starts or applies is ended and taken
away when it is over.
"""

import dataclasses
import json
import threading
from collections.abc import Sequence
from typing import Any

from penstock.clock import SYSTEM_CLOCK
from penstock.errors import PenstockError
from penstock.materialize.client import Connection
from penstock.protocol.messages import Validate, ValidateBinding, Validated
from penstock.testing.conformance.check import Failed, Need, Skipped
from penstock.testing.conformance.config import EXACTLY_ONCE, Config, Pattern, filled
from penstock.testing.conformance.documents import shown
from penstock.testing.conformance.exchange import Exchange
from penstock.testing.conformance.process import Connectors
from penstock.testing.conformance.task import Resource, Task

__all__ = ["Peer", "delta_task"]


class Peer:
    """What a check has to work with."""

    def __init__(self, connectors: Connectors, prefix: str) -> None:
        self.connectors = connectors
        self.config: Config = connectors.config
        self.messages: list[str] = []
        """What was said, in order."""

        self.notes: list[str] = []
        """What could not be looked at."""

        self._prefix = prefix
        self._named = 0
        self._tasks: list[Task] = []
        self._exchanges: list[Exchange] = []

    @property
    def connection(self) -> Connection:
        """A line to the connector."""
        return self.connectors.connection()

    @property
    def exact(self) -> bool:
        """Whether each transaction takes effect once."""
        return self.config.pattern in EXACTLY_ONCE

    @property
    def remote(self) -> bool:
        """Whether the endpoint keeps the checkpoint."""
        return self.config.pattern is Pattern.REMOTE_AUTHORITATIVE

    @property
    def endpoint_json(self) -> str:
        """The endpoint configuration."""
        return json.dumps(self.config.endpoint)

    def shown(self, value: Any) -> str:
        """A value in a message, without secrets, and not longer than a line."""
        return shown(value, self.connectors.hide)

    def fresh(self) -> str:
        """A name that nothing has yet."""
        self._named += 1
        return f"{self._prefix}_{self._named}"

    def resource_json(self, name: str, *, delta: bool = False) -> str:
        """The resource configuration of this name."""
        template = self.config.delta_resource if delta else None
        return json.dumps(filled(template or self.config.resource, name=name))

    def exchange(self, *, checked: bool = True, connection: Connection | None = None) -> Exchange:
        """A new stream, over which nothing was said yet."""
        stream = (connection or self.connection).transactions(checked=checked)
        number = len(self._exchanges) + 1
        found = Exchange(
            stream,
            self.config.patience_s,
            lambda said: self.messages.append(f"stream {number} {said}"),
        )
        self._exchanges.append(found)
        return found

    def task(self, *resources: Resource, apply: bool = True) -> Task:
        """A new materialization, validated, and applied unless told otherwise."""
        wanted = [
            dataclasses.replace(each, name=each.name or self.fresh())
            for each in resources or (Resource(),)
        ]
        task = Task(self, f"conformance/{self.fresh()}", wanted)
        self._tasks.append(task)
        if apply:
            task.apply()
        return task

    def ask(
        self, bindings: Sequence[ValidateBinding], endpoint_json: str = "", name: str = ""
    ) -> Validated:
        """Ask Validate about these bindings of the materialization called `name`.

        Raises:
            Failed: it does not answer about each of them.
        """
        self.messages.append(f"▸ Validate of {len(bindings)} bindings")
        name = name or f"conformance/{self._prefix}"
        answer = self.connection.validate(
            Validate(name, endpoint_json or self.endpoint_json, tuple(bindings))
        )
        if len(answer.bindings) != len(bindings):
            raise Failed(f"Validated has {len(answer.bindings)} bindings for {len(bindings)}")
        return answer

    def another(self) -> Connection:
        """A line to a second process over the same endpoint."""
        self.messages.append("▸ over to another process")
        return self.connectors.another()

    def kill(self) -> None:
        """End the connector at once; it is started again when it is next spoken to."""
        self.messages.append("▸ kill -9")
        self.connectors.kill()

    def pause(self) -> None:
        """Let the connector get at what was sent, where no answer says that it has."""
        SYSTEM_CLOCK.wait(threading.Event(), round(self.config.settle_s * 1_000))

    def note(self, text: str) -> None:
        """Say what a check that passes did not look at."""
        if text not in self.notes:
            self.notes.append(text)

    def close(self) -> None:
        """End streams, and take away what was applied, as far as can be."""
        for each in self._exchanges:
            each.close()
        for task in self._tasks:
            try:
                task.delete()
            except PenstockError:
                return  # What cannot be reached cannot be cleaned.


def delta_task(peer: Peer, *others: Resource) -> Task:
    """A task whose first binding takes delta updates, and can be read.

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
            f"a delta binding of `resource` is refused ({error}), and there is no `delta_resource`"
        ) from error
