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
from penstock.materialize.client import Connection, connect
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
                hint="Give the address it listens on, or `command` in the file to start it.",
            )
        self.config = config
        self._address = address
        self._folder = folder
        self._clock = clock
        self._processes: list[subprocess.Popen[bytes]] = []
        self._main: subprocess.Popen[bytes] | None = None
        self._line: Connection | None = None
        self._other: tuple[subprocess.Popen[bytes], Connection] | None = None
        self._logs: list[Path] = []
        self.hide: Callable[[str], str] = hider(config)
        """Function that redacts secrets in displayed text."""

    def connection(self) -> Connection:
        """Return a connection to the connector; start the connector if it does not run."""
        if self.config.command and (self._main is None or self._main.poll() is not None):
            if self._main is not None:
                self.kill()
            self._main, self._line = self._started(self._address or _free_address())
        if self._line is None:
            if self._address is None:
                raise NotStarted("there is no connector to check")
            self._line = connect(self._address, self.config.security)
        return self._line

    def another(self) -> Connection:
        """Return a connection to a second, lasting process with the same endpoint."""
        if not self.config.command:
            raise Skipped(Need.COMMAND.value)
        if self._other is not None and self._other[0].poll() is not None:
            self._kill(self._other[0])
            self._other = None
        if self._other is None:
            self._other = self._started(_free_address())
        return self._other[1]

    def kill(self) -> None:
        """Kill the connector; the next `connection` starts it again."""
        if self._main is None:
            raise Skipped(Need.COMMAND.value)
        self._kill(self._main)
        self._main = None
        self._hang_up()

    def serves(self) -> None:
        """Check that the connector still answers.

        Raises:
            Failed: the connector has ended, or does not answer.
        """
        if self._main is not None and (ended := self._main.poll()) is not None:
            raise Failed(f"the connector has ended with {ended}")
        try:
            self.connection().spec()
        except ConnectorError as error:
            raise Failed(f"the connector answers no more: {error}", detail=error.detail) from error

    def printed(self) -> Mapping[Path, int]:
        """Return the number of bytes that each process has printed so far."""
        return {each: each.stat().st_size for each in self._logs}

    def last_lines(self, before: Mapping[Path, int]) -> Sequence[str]:
        """Return the last complete lines printed since `before`, without secrets."""
        lines = []
        for each in self._logs:
            begin = max(before.get(each, 0), each.stat().st_size - 10 * _TAIL)
            with each.open("rb") as said:
                said.seek(max(begin - 1, 0))
                text = said.read().decode(errors="replace")
            if begin:
                text = text.partition("\n")[2]
            lines += [line for line in self.hide(text).splitlines() if line.strip()]
        return lines[-_LINES:]

    def close(self) -> None:
        """End all processes."""
        for each in [*self._processes]:
            self._kill(each)
        self._hang_up()
        if self._other is not None:
            self._other[1].close()

    def rows(self, name: str) -> list[dict[str, Any]]:
        """Return the rows that `read` prints for a resource."""
        if not self.config.read:
            raise Skipped(Need.READ.value)
        try:
            done = subprocess.run(
                filled(self.config.read, name=name),
                capture_output=True,
                check=False,
                timeout=self.config.patience_s,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise UsageError(
                "`read` cannot be run",
                detail=f"{type(error).__name__}.",
                hint="It must print the rows of the resource {name} and end.",
            ) from error
        if done.returncode:
            raise Failed(
                f"`read` of {name} ended with {done.returncode}",
                detail=self.hide(done.stderr.decode(errors="replace"))[-_TAIL:],
            )
        lines = done.stdout.decode().splitlines()
        return [_row(line, self.hide) for line in lines if line.strip()]

    def _started(self, address: str) -> tuple[subprocess.Popen[bytes], Connection]:
        port = address.rpartition(":")[2]
        said = self._folder / f"connector-{len(self._logs)}.log"
        self._logs.append(said)
        try:
            with said.open("wb") as output:
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
                f"`command` cannot be run: {error.strerror}",
                hint="Its first word must be a program.",
            ) from error
        self._processes.append(process)
        until = self._clock.boot_ms() + round(self.config.start_s * 1_000)
        while not _listens(address):
            if process.poll() is not None or self._clock.boot_ms() > until:
                ended = process.poll()
                self._kill(process)
                raise NotStarted(
                    f"the connector did not listen on {address}"
                    + (f": `command` ended with {ended}" if ended is not None else ""),
                    detail=self.hide(said.read_text(errors="replace"))[-_TAIL:],
                    hint="It must listen on {address}, which is also in $ADDRESS.",
                )
            self._clock.wait(threading.Event(), _POLL_MS)
        return process, connect(address, self.config.security)

    def _hang_up(self) -> None:
        if self._line is not None:
            self._line.close()
            self._line = None

    def _kill(self, process: subprocess.Popen[bytes]) -> None:
        # Also after its end: its children may still run in its process group.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        self._processes.remove(process)


def _row(line: str, hide: Callable[[str], str]) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise Failed(
            "`read` printed a line that is not a JSON object",
            detail=f"{hide(line)[:200]!r}",
            hint="It must print a row, or a document, as one JSON object a line.",
        )
    return found


def _free_address() -> str:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{found.getsockname()[1]}"


def _listens(address: str) -> bool:
    if address.startswith("unix:"):
        return Path(address.removeprefix("unix:")).exists()
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=1).close()
    except OSError:
        return False
    return True
