"""A built-in connector, started beside the driver, for it and for its tasks alone.

On this host it listens on a socket that is a file of ours. For tasks on other hosts it
listens on a port, with TLS by the certificate of the run, and asks for a token that nobody else
knows. It ends when we do, however
that comes: the system closes the pipe that it reads, when nobody is there to write. What
the environment holds is ours; it is given no more of it than Python needs.
"""

import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from penstock.clock import Clock
from penstock.deadlines import STOP_GRACE_S, stop_timeout_s
from penstock.materialize.errors import ConnectorRefused, ConnectorUnreachable
from penstock.materialize.run_certificate import SERVER_NAME, run_certificate
from penstock.pipeline.file import ConnectorSection
from penstock.protocol.transport_security import Security
from penstock.telemetry import fields, logger

__all__ = ["Hosted", "reached_connector"]

log = logger("materialize")

START_MS: Final = 60_000
POLL_MS: Final = 20
WATCH_S: Final = 0.2
"""Longest time between two looks at whether it is closed."""

SAID_CHARACTERS: Final = 2_000

INHERITED: Final = re.compile(
    "PATH|HOME|USER|LOGNAME|LANG|LC_.*|TZ|TMPDIR|LD_LIBRARY_PATH|DYLD_LIBRARY_PATH|VIRTUAL_ENV"
    "|PYTHON.*|NUMBA_.*|GRPC_.*|SSL_CERT_FILE|SSL_CERT_DIR|PENSTOCK_(ANSWER|STOP)_TIMEOUT"
)
"""What it sees of the environment. Passwords and keys are there, too; those that a connector
needs are told to it in its configuration."""


def reached_connector(
    stack: ExitStack,
    connector: str | ConnectorSection,
    clock: Clock,
    host: str | None = None,
    *,
    stop: threading.Event | None = None,
) -> tuple[str, Security]:
    """Where a connector is, and how it is spoken to; ours is started, until `stack` ends.

    If `stack` has not ended a third of the stop deadline after `stop` was set, our connector is
    ended, and all calls to it fail: its endpoint hangs, or the transaction is too long.
    """
    if isinstance(connector, str):
        hosted = Hosted(connector, clock, host)
        stack.callback(hosted.close)
        hosted.start(stop)
        if stop is not None:
            hosted.end_after(stop)
        return hosted.address, hosted.security
    grpc, tls = connector.grpc, connector.grpc.tls
    return grpc.address, Security(
        ca=tls.ca if tls else None,
        certificate=tls.certificate if tls else None,
        key=tls.key if tls else None,
        token=grpc.token,
        plaintext=grpc.plaintext,
    )


class Hosted:
    """A connector's process."""

    def __init__(self, name: str, clock: Clock, host: str | None = None) -> None:
        """The built-in connector `name`; with a `host` it listens there, on a free port."""
        self._name = name
        self._clock = clock
        self._host = host
        self._folder = Path(tempfile.mkdtemp(prefix="penstock-"))
        self._process: subprocess.Popen[bytes] | None = None
        self._starts = 0
        self._closed = threading.Event()
        self._ending = threading.Lock()
        self.address = ""
        self.security = Security()
        if host is not None:
            self.security = Security(
                ca=run_certificate().certificate,
                token=secrets.token_hex(32),
                server_name=SERVER_NAME,
            )

    def running(self) -> bool:
        """Whether it is there."""
        return self._process is not None and self._process.poll() is None

    def start(self, stop: threading.Event | None = None) -> None:
        """Start it, again if need be, and wait until it listens, which may be elsewhere then.

        Raises:
            ConnectorRefused: it ended, and says why.
            ConnectorUnreachable: it was ended, does not listen, or `stop` is set.
        """
        stop = stop or threading.Event()
        self.stop()
        self._starts += 1
        said = self._folder / f"{self._starts}.log"
        with said.open("wb") as output:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "penstock.cli.main", "connector", "serve"),
                    *(self._name, "--until-stdin-ends", "--warm", *self._listening()),
                ],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env={
                    name: value for name, value in os.environ.items() if INHERITED.fullmatch(name)
                },
            )
        until = self._clock.boot_ms() + START_MS
        listens = re.compile(rf"^connector {re.escape(self._name)} listens on (.+)\n", re.MULTILINE)
        while True:
            ended = not self.running()
            text = said.read_text(errors="replace")
            if (found := listens.search(text)) and not ended:
                self.address = found[1]
                return
            if ended or self._clock.boot_ms() > until:
                code = self._process.poll()
                self.stop()
                # One that ends by itself says why, and would say it again.
                kind = ConnectorRefused if code is not None and code > 0 else ConnectorUnreachable
                raise kind(
                    f'connector "{self._name}" could not be started',
                    detail=text[-SAID_CHARACTERS:],
                    hint="Connectors that are built in: penstock connector list",
                )
            if self._clock.wait(stop, POLL_MS):
                self.stop(STOP_GRACE_S)
                raise ConnectorUnreachable(
                    f'stopped while connector "{self._name}" was being started'
                )

    def _listening(self) -> list[str]:
        """Where, and who may call."""
        if self._host is None:
            return ["--listen", f"unix:{self._folder / f'{self._starts}.socket'}"]
        host = f"[{self._host}]" if ":" in self._host.strip("[]") else self._host
        token = self._folder / "token"
        # By a file, for what stands on a command line is seen by everybody on this host.
        with open(token, "w", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
            file.write(self.security.token)
        certificate, key = run_certificate().write(self._folder)
        return [
            *("--listen", f"{host}:0", "--token-file", str(token)),
            *("--tls-cert", str(certificate), "--tls-key", str(key)),
        ]

    def end_after(self, stop: threading.Event) -> None:
        """End the process a third of the stop deadline after `stop` is set, unless closed by then.

        What is under way then has an unknown outcome, as after a crash.
        """
        grace_s = stop_timeout_s() / 3

        def watch() -> None:
            while not self._closed.is_set():
                if not stop.wait(WATCH_S) or self._closed.wait(grace_s):
                    continue
                log.warning(
                    "connector still busy; ending it",
                    extra=fields(connector=self._name, after_s=grace_s),
                )
                self.stop(STOP_GRACE_S)
                return

        threading.Thread(target=watch, name=f"stop of {self._name}", daemon=True).start()

    def stop(self, patience_s: float | None = None) -> None:
        """End it; streams that are open are rolled back.

        After `patience_s`, or a third of the stop deadline, it is killed; then the endpoint
        rolls back, once it notices.
        """
        if patience_s is None:
            patience_s = stop_timeout_s() / 3
        with self._ending:
            process, self._process = self._process, None
            if process is None:
                return
            with process:  # Whose pipe is closed in the end.
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGTERM)
                    try:
                        process.wait(patience_s)
                    except subprocess.TimeoutExpired:
                        os.killpg(process.pid, signal.SIGKILL)

    def close(self) -> None:
        """End it, and leave nothing behind."""
        self._closed.set()
        self.stop()
        shutil.rmtree(self._folder, ignore_errors=True)
