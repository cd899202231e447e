"""Schema registry in a temporary folder, which can be stopped, killed and restarted.

    with SchemaRegistry() as registry:
        client = SchemaRegistryClient({"url": registry.url})
        …
        registry.kill()       # as a power cut of the process, not of the disk
        registry.start()      # on the same port, with the same schemas

The registry is Apicurio, which implements Confluent's API. It is run from its archive, which is
downloaded once; see `engine/jars.py`. It listens on 127.0.0.1 only, without authentication. It
stores a schema in a file before it acknowledges the request.
"""

import shutil
import signal
import tarfile
import tempfile
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Final

from penstock.engine import find_java, jars_for, read_pins
from penstock.errors import UsageError
from penstock.servers.kafka import JAVA_OPTIONS
from penstock.servers.process import (
    LocalServer,
    ServerProcess,
    end_with_parent,
    free_port,
    wait_until,
)

__all__ = ["SchemaRegistry"]

HOST: Final = "127.0.0.1"
API_PATH: Final = "/apis/ccompat/v7"
"""Path of Confluent's API, next to the registry's own ones."""


class SchemaRegistry(LocalServer):
    """Registry that can be killed and restarted on the same port."""

    def __init__(self) -> None:
        """Prepare a registry without starting it.

        Raises:
            UsageError: there is no Java, or the archive is not available.
        """
        self._java = find_java()
        (archive,) = jars_for(read_pins(_PINS))
        self._port = free_port()
        self.folder = Path(tempfile.mkdtemp(prefix="penstock-registry-"))
        with tarfile.open(archive) as packed:
            packed.extractall(self.folder / "app", filter="data")
        (self._program,) = (self.folder / "app").glob("*-runner.jar")
        self._process = ServerProcess(self.folder)

    @property
    def url(self) -> str:
        """URL of Confluent's API."""
        return f"http://{HOST}:{self._port}{API_PATH}"

    @property
    def pid(self) -> int | None:
        """Process id while it runs, else None."""
        return self._process.pid

    def start(self) -> None:
        """Start the registry if it does not run, and wait until it answers."""
        if self.pid is None:
            self._process.start(end_with_parent(self._command(), "KILL"))
        wait_until(self._answers, "the schema registry to answer", log=self.log_tail)

    def stop(self) -> None:
        """Stop the registry with SIGTERM."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """End the registry with SIGKILL. Acknowledged schemas are in its file."""
        self._end(signal.SIGKILL)

    def close(self) -> None:
        """End the registry and remove its folder. Safe to call twice."""
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def log_tail(self, lines: int = 30) -> str:
        """Return the end of the output."""
        return self._process.log_tail(lines)

    def _command(self) -> list[str]:
        settings = {
            "java.io.tmpdir": self.folder,
            "quarkus.http.host": HOST,
            "quarkus.http.port": self._port,
            "quarkus.http.access-log.enabled": "false",
            # Without a write delay, a response means that the schema is in the file.
            "apicurio.datasource.url": f"jdbc:h2:file:{self.folder}/schemas;WRITE_DELAY=0",
            "apicurio.datasource.jdbc.initial-size": 1,
            "apicurio.datasource.jdbc.min-size": 1,
            "apicurio.datasource.jdbc.max-size": 4,
            "apicurio.import.work-dir": self.folder,
            "apicurio.storage.snapshot.location": self.folder,
        }
        return [
            *(str(self._java.program), *JAVA_OPTIONS, "-Xmx128m"),
            *(f"-D{name}={value}" for name, value in settings.items()),
            *("-jar", str(self._program)),
        ]

    def _answers(self) -> bool:
        if self.pid is None:
            raise UsageError("schema registry did not start", detail=self.log_tail())
        connection = HTTPConnection(HOST, self._port, timeout=2)
        try:
            connection.request("GET", f"{API_PATH}/subjects")
            return connection.getresponse().status == 200
        except (OSError, HTTPException):
            return False  # The registry listens before it has created its tables.
        finally:
            connection.close()

    def _end(self, number: signal.Signals) -> None:
        self._process.signal(number)
        self._process.wait_or_kill()


_PINS: Final = Path(__file__).with_name("registry.txt")
