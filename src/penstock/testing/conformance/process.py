"""Processes of connectors: start, kill, output, and contents of their endpoint.

A kill sends SIGKILL to the process group, so a wrapper script does not protect its child. The
output is stored, because it may explain the failure of a check.
"""

import json
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.errors import UsageError
from penstock.materialize.connector_client import ConnectorConnection, connect
from penstock.materialize.errors import ConnectorError
from penstock.testing.conformance.check import Failed, Need, Skipped
from penstock.testing.conformance.config import Config, filled
from penstock.testing.conformance.redaction import hider

__all__ = ["Connectors", "NotStarted"]

_POLL_MS: Final = 20
_TAIL: Final = 2_000
_LINES: Final = 20


class NotStarted(UsageError):
    """Failed start of the connector."""


class Connectors:
    """Connector under test, and a second process of it on request."""

    def __init__(
        self, config: Config, address: str | None, folder: Path, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        if address is None and not config.command:
            raise UsageError(
                "there is no connector to check",
                hint="Pass the address of the connector, or set `command` in the file.",
            )
        self.config = config
        self._address = address
        self._folder = folder
        self._clock = clock
        self._processes: list[subprocess.Popen[bytes]] = []
        self._main: subprocess.Popen[bytes] | None = None
        self._connection: ConnectorConnection | None = None
        self._other: tuple[subprocess.Popen[bytes], ConnectorConnection] | None = None
        self._logs: list[Path] = []
        self.hide: Callable[[str], str] = hider(config)
        """Function that redacts secrets in displayed text."""

    def connection(self) -> ConnectorConnection:
        """Return a connection to the connector; start the connector if it does not run."""
        if self.config.command and (self._main is None or self._main.poll() is not None):
            if self._main is not None:
                self.kill()
            self._main, self._connection = self._start(self._address or _free_address())
        if self._connection is None:
            if self._address is None:
                raise NotStarted("there is no connector to check")
            self._connection = connect(self._address, self.config.security)
        return self._connection

    def second_connection(self) -> ConnectorConnection:
        """Return a connection to a second, lasting process with the same endpoint."""
        if not self.config.command:
            raise Skipped(Need.COMMAND.value)
        if self._other is not None and self._other[0].poll() is not None:
            self._kill(self._other[0])
            self._other = None
        if self._other is None:
            self._other = self._start(_free_address())
        return self._other[1]

    def kill(self) -> None:
        """Kill the connector; the next `connection` starts it again."""
        if self._main is None:
            raise Skipped(Need.COMMAND.value)
        self._kill(self._main)
        self._main = None
        self._disconnect()

    def serves(self) -> None:
        """Check that the connector still answers.

        Raises:
            Failed: the connector has ended, or does not answer.
        """
        if self._main is not None and (status := self._main.poll()) is not None:
            raise Failed(f"the connector has ended with status {status}")
        try:
            self.connection().spec()
        except ConnectorError as error:
            raise Failed(f"the connector does not respond: {error}", detail=error.detail) from error

    def printed(self) -> Mapping[Path, int]:
        """Return the number of bytes that each process has printed so far."""
        return {log: log.stat().st_size for log in self._logs}

    def last_lines(self, before: Mapping[Path, int]) -> Sequence[str]:
        """Return the last complete lines printed since `before`, without secrets."""
        lines = []
        for log in self._logs:
            begin = max(before.get(log, 0), log.stat().st_size - 10 * _TAIL)
            with log.open("rb") as file:
                file.seek(max(begin - 1, 0))
                text = file.read().decode(errors="replace")
            if begin:
                text = text.partition("\n")[2]
            lines += [line for line in self.hide(text).splitlines() if line.strip()]
        return lines[-_LINES:]

    def close(self) -> None:
        """End all processes."""
        for process in [*self._processes]:
            self._kill(process)
        self._disconnect()
        if self._other is not None:
            self._other[1].close()

    def rows(self, name: str) -> list[dict[str, Any]]:
        """Return the rows that `read` prints for a resource."""
        if not self.config.read:
            raise Skipped(Need.READ.value)
        try:
            process = subprocess.run(
                filled(self.config.read, name=name),
                capture_output=True,
                check=False,
                timeout=self.config.patience_s,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise UsageError(
                "could not run `read`",
                detail=f"{type(error).__name__}.",
                hint="The command prints the rows of the resource {name} and exits.",
            ) from error
        if process.returncode:
            raise Failed(
                f"`read` of {name} ended with status {process.returncode}",
                detail=self.hide(process.stderr.decode(errors="replace"))[-_TAIL:],
            )
        lines = process.stdout.decode().splitlines()
        return [_row(line, self.hide) for line in lines if line.strip()]

    def _start(self, address: str) -> tuple[subprocess.Popen[bytes], ConnectorConnection]:
        port = address.rpartition(":")[2]
        log = self._folder / f"connector-{len(self._logs)}.log"
        self._logs.append(log)
        try:
            with log.open("wb") as output:
                process = subprocess.Popen(
                    filled(self.config.command, address=address, port=port),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env={**os.environ, "ADDRESS": address},
                    start_new_session=True,
                )
        except OSError as error:
            raise NotStarted(
                f"could not run `command`: {error.strerror}",
                hint="The first element of `command` is the program.",
            ) from error
        self._processes.append(process)
        deadline_ms = self._clock.boot_ms() + round(self.config.start_s * 1_000)
        while not _listens(address):
            if process.poll() is not None or self._clock.boot_ms() > deadline_ms:
                status = process.poll()
                self._kill(process)
                raise NotStarted(
                    f"the connector did not listen on {address}"
                    + (f": `command` ended with status {status}" if status is not None else ""),
                    detail=self.hide(log.read_text(errors="replace"))[-_TAIL:],
                    hint="Listen on {address}, which is also in $ADDRESS.",
                )
            self._clock.wait(threading.Event(), _POLL_MS)
        return process, connect(address, self.config.security)

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _kill(self, process: subprocess.Popen[bytes]) -> None:
        # Also after its end: its children may still run in its process group.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        self._processes.remove(process)


def _row(line: str, hide: Callable[[str], str]) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError:
        row = None
    if not isinstance(row, dict):
        raise Failed(
            "`read` printed a line that is not a JSON object",
            detail=f"{hide(line)[:200]!r}",
            hint="Print each row or document as one JSON object per line.",
        )
    return row


def _free_address() -> str:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{bound.getsockname()[1]}"


def _listens(address: str) -> bool:
    if address.startswith("unix:"):
        return Path(address.removeprefix("unix:")).exists()
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=1).close()
    except OSError:
        return False
    return True
