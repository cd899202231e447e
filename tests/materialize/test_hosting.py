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
from penstock.materialize.errors import ConnectorRefused, ConnectorUnreachable
from penstock.materialize.hosting import Hosted

PATIENCE_S = 60


@contextmanager
def hosted(host: str | None = None) -> Iterator[Hosted]:
    found = Hosted("push-files", SYSTEM_CLOCK, host)
    try:
        yield found
    finally:
        found.close()


def answers(found: Hosted) -> bool:
    with connect(found.address, found.security) as connection:
        return bool(connection.spec().endpoint_spec_schema_json)


def process(found: Hosted) -> int:
    assert found._process is not None
    return found._process.pid


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
    raise AssertionError("it did not come")


def test_hosted_connector_restarts_at_new_address_and_close_removes_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with hosted() as found:
        assert not found.running()
        found.start()
        assert found.running()
        assert answers(found)
        first, before = process(found), found.address
        os.kill(first, signal.SIGKILL)
        until(lambda: not found.running())
        found.start()
        assert found.address != before
        assert answers(found)
        last = process(found)
    assert not found.running()
    assert not alive(first)
    assert not alive(last)
    assert not [*tmp_path.iterdir()]


def test_hosted_connector_on_tcp_requires_tls_and_token_and_does_not_leak_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("PGPASSWORD", "hush")
    with hosted(host="127.0.0.1") as found:
        found.start()
        host, _, port = found.address.rpartition(":")
        assert host == "127.0.0.1"
        assert int(port) > 0
        plain = connect(found.address)
        with plain, pytest.raises(ConnectorUnreachable):
            plain.spec()
        stranger = connect(found.address, replace(found.security, token=""))
        with stranger, pytest.raises(ConnectorRefused, match="token"):
            stranger.spec()
        untrusting = connect(found.address, replace(found.security, server_name="elsewhere"))
        with untrusting, pytest.raises(ConnectorUnreachable):
            untrusting.spec()
        assert answers(found)
        token = found.security.token
        assert len(bytes.fromhex(token)) == 32
        about = Path(f"/proc/{process(found)}")
        assert token.encode() not in (about / "cmdline").read_bytes()
        assert b"hush" not in (about / "environ").read_bytes()
        assert f"PATH={os.environ['PATH']}".encode() in (about / "environ").read_bytes()
        files = [each for each in tmp_path.rglob("*") if each.is_file()]
        assert [each.name for each in files if token in each.read_text()] == ["token"]
        [folder] = tmp_path.iterdir()
        for secret in ("token", "run.key"):
            assert (folder / secret).stat().st_mode & 0o777 == 0o600
        assert b"PRIVATE KEY" not in pickle.dumps(found.security)
        assert token not in repr(found.security)


def test_hosted_connector_on_unavailable_address_raises_connector_refused_with_reason():
    with hosted(host="192.0.2.1") as found:  # TEST-NET-1, not a local address.
        with pytest.raises(ConnectorRefused, match="could not be started") as caught:
            found.start()
        assert 'cannot listen on "192.0.2.1:0"' in caught.value.detail
        assert not found.running()


SCRIPT = """
from penstock.clock import SYSTEM_CLOCK
from penstock.materialize.hosting import Hosted

hosted = Hosted("push-files", SYSTEM_CLOCK)
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
