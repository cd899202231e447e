"""A connector process that the runtime starts is private to it and ends with it."""

import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.clock import SYSTEM_CLOCK
from penstock.materialize import connect
from penstock.materialize.connector_process import ConnectorProcess
from penstock.materialize.errors import ConnectorRefused, ConnectorUnreachable

PATIENCE_S = 60


@contextmanager
def hosted(host: str | None = None) -> Iterator[ConnectorProcess]:
    connector = ConnectorProcess("push-files", SYSTEM_CLOCK, host)
    try:
        yield connector
    finally:
        connector.close()


def answers(connector: ConnectorProcess) -> bool:
    with connect(connector.address, connector.security) as connection:
        return bool(connection.spec().endpoint_spec_schema_json)


def process(connector: ConnectorProcess) -> int:
    assert connector._process is not None
    return connector._process.pid


def alive(pid: int) -> bool:
    """Return whether the process runs. A zombie has ended and waits for its parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def until(condition: Callable[[], bool]) -> None:
    waited = threading.Event()
    for _ in range(PATIENCE_S * 50):
        if condition():
            return
        waited.wait(0.02)
    raise AssertionError("the condition was not reached")


def test_hosted_connector_restarts_at_new_address_and_close_removes_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with hosted() as connector:
        assert not connector.running()
        connector.start()
        assert connector.running()
        assert answers(connector)
        first, before = process(connector), connector.address
        os.kill(first, signal.SIGKILL)
        until(lambda: not connector.running())
        connector.start()
        assert connector.address != before
        assert answers(connector)
        last = process(connector)
    assert not connector.running()
    assert not alive(first)
    assert not alive(last)
    assert not [*tmp_path.iterdir()]


def test_hosted_connector_on_tcp_requires_tls_and_token_and_does_not_leak_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("PGPASSWORD", "hush")
    with hosted(host="127.0.0.1") as connector:
        connector.start()
        host, _, port = connector.address.rpartition(":")
        assert host == "127.0.0.1"
        assert int(port) > 0
        plain = connect(connector.address)
        with plain, pytest.raises(ConnectorUnreachable):
            plain.spec()
        stranger = connect(connector.address, replace(connector.security, token=""))
        with stranger, pytest.raises(ConnectorRefused, match="token"):
            stranger.spec()
        untrusting = connect(
            connector.address, replace(connector.security, server_name="elsewhere")
        )
        with untrusting, pytest.raises(ConnectorUnreachable):
            untrusting.spec()
        assert answers(connector)
        token = connector.security.token
        assert len(bytes.fromhex(token)) == 32
        about = Path(f"/proc/{process(connector)}")
        assert token.encode() not in (about / "cmdline").read_bytes()
        assert b"hush" not in (about / "environ").read_bytes()
        assert f"PATH={os.environ['PATH']}".encode() in (about / "environ").read_bytes()
        files = [each for each in tmp_path.rglob("*") if each.is_file()]
        assert [each.name for each in files if token in each.read_text()] == ["token"]
        [folder] = tmp_path.iterdir()
        for secret in ("token", "run.key"):
            assert (folder / secret).stat().st_mode & 0o777 == 0o600
        assert b"PRIVATE KEY" not in pickle.dumps(connector.security)
        assert token not in repr(connector.security)


def test_hosted_connector_on_unavailable_address_raises_connector_refused_with_reason():
    with hosted(host="192.0.2.1") as connector:  # TEST-NET-1, not a local address.
        with pytest.raises(ConnectorRefused, match="could not be started") as caught:
            connector.start()
        assert 'cannot listen on "192.0.2.1:0"' in caught.value.detail
        assert not connector.running()


SCRIPT = """
from penstock.clock import SYSTEM_CLOCK
from penstock.materialize.connector_process import ConnectorProcess

hosted = ConnectorProcess("push-files", SYSTEM_CLOCK)
hosted.start()
print(hosted._process.pid, flush=True)
input()
"""


def test_hosted_connector_exits_when_its_parent_process_is_killed(tmp_path: Path):
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    ) as driver:
        assert driver.stdout is not None
        pid = int(driver.stdout.readline())
        assert alive(pid)
        driver.kill()
        driver.wait()
    until(lambda: not alive(pid))
