"""Process of a built-in connector, next to the driver and for its Spark tasks only.

On this host, the connector listens on a Unix socket in a private folder. For Spark tasks on other
hosts, it listens on a TCP port. That port uses TLS with the certificate of the run, and requires a
token that only this run has.

The connector ends with this process, even after a crash: the operating system then closes the
pipe to its standard input. The connector inherits only the environment variables that Python
needs, because the others may hold secrets.
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
from penstock.pipeline import ConnectorSection
from penstock.protocol.transport_security import Security
from penstock.telemetry import fields, logger

__all__ = ["ConnectorProcess", "resolve_connector"]

log = logger("materialize")

START_MS: Final = 60_000
POLL_MS: Final = 20
WATCH_S: Final = 0.2
"""Longest wait between two checks whether the connector is closed."""

OUTPUT_CHARACTERS: Final = 2_000

INHERITED: Final = re.compile(
    "PATH|HOME|USER|LOGNAME|LANG|LC_.*|TZ|TMPDIR|LD_LIBRARY_PATH|DYLD_LIBRARY_PATH|VIRTUAL_ENV"
    "|PYTHON.*|NUMBA_.*|GRPC_.*|SSL_CERT_FILE|SSL_CERT_DIR|PENSTOCK_(ANSWER|STOP)_TIMEOUT"
)
"""Names of the environment variables that the connector inherits.

Other variables may hold passwords and keys. A connector receives its own secrets in its config.
"""


def resolve_connector(
    stack: ExitStack,
    connector: str | ConnectorSection,
    clock: Clock,
    host: str | None = None,
    *,
    stop: threading.Event | None = None,
) -> tuple[str, Security]:
    """Return the address and the security settings of a connector.

    A built-in connector is started, and runs until `stack` closes. If `stack` is still open a
    third of the stop deadline after `stop` is set, the endpoint hangs or the transaction is too
    long. The built-in connector is then stopped, and all calls to it fail.
    """
    if isinstance(connector, str):
        hosted = ConnectorProcess(connector, clock, host)
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


class ConnectorProcess:
    """Process of a built-in connector."""

    def __init__(self, name: str, clock: Clock, host: str | None = None) -> None:
        """Prepare the built-in connector `name`, without starting it.

        With `host`, it listens on a free port of that address, else on a Unix socket.
        """
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
        """Return whether the process is running."""
        return self._process is not None and self._process.poll() is None

    def start(self, stop: threading.Event | None = None) -> None:
        """Start or restart the process, and wait until it listens.

        Each start changes `address`.

        Raises:
            ConnectorRefused: the process exited with an error. The detail has its output.
            ConnectorUnreachable: a signal ended the process, it does not listen in time, or
                `stop` is set.
        """
        stop = stop or threading.Event()
        self.stop()
        self._starts += 1
        output_file = self._folder / f"{self._starts}.log"
        with output_file.open("wb") as output:
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
            text = output_file.read_text(errors="replace")
            if (listening := listens.search(text)) and not ended:
                self.address = listening[1]
                return
            if ended or self._clock.boot_ms() > until:
                code = self._process.poll()
                self.stop()
                # A process that exits by itself prints the reason, and would fail again.
                kind = ConnectorRefused if code is not None and code > 0 else ConnectorUnreachable
                raise kind(
                    f'connector "{self._name}" could not be started',
                    detail=text[-OUTPUT_CHARACTERS:],
                    hint="List the built-in connectors: penstock connector list",
                )
            if self._clock.wait(stop, POLL_MS):
                self.stop(STOP_GRACE_S)
                raise ConnectorUnreachable(
                    f'stopped while connector "{self._name}" was being started'
                )

    def _listening(self) -> list[str]:
        """Return the options for the address and for the authentication of callers."""
        if self._host is None:
            return ["--listen", f"unix:{self._folder / f'{self._starts}.socket'}"]
        host = f"[{self._host}]" if ":" in self._host.strip("[]") else self._host
        token = self._folder / "token"
        # In a file: every user of this host can read a command line.
        with open(token, "w", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
            file.write(self.security.token)
        certificate, key = run_certificate().write(self._folder)
        return [
            *("--listen", f"{host}:0", "--token-file", str(token)),
            *("--tls-cert", str(certificate), "--tls-key", str(key)),
        ]

    def end_after(self, stop: threading.Event) -> None:
        """Stop the process a third of the stop deadline after `stop` is set, unless closed by then.

        A transaction in progress then has an unknown outcome, as after a crash.
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

    def stop(self, timeout_s: float | None = None) -> None:
        """Terminate the process; it rolls back the transactions of its open streams.

        After `timeout_s`, by default a third of the stop deadline, the process is killed. The
        endpoint then rolls back when it detects the lost connection.
        """
        if timeout_s is None:
            timeout_s = stop_timeout_s() / 3
        with self._ending:
            process, self._process = self._process, None
            if process is None:
                return
            with process:  # Closes the pipe at the end.
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGTERM)
                    try:
                        process.wait(timeout_s)
                    except subprocess.TimeoutExpired:
                        os.killpg(process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Stop the process and delete its folder."""
        self._closed.set()
        self.stop()
        shutil.rmtree(self._folder, ignore_errors=True)
