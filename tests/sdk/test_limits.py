"""Limits on the memory and threads that one peer can use."""

import subprocess
import sys
from pathlib import Path

import grpc
import pytest

from penstock.materialize import connect
from penstock.materialize.errors import ConnectorError
from penstock.sdk import serve, server
from tests.sdk.stream_client import ready, until
from tests.sdk.toy import Toy

LARGE = 200 << 20
SERVED = (sys.executable, "-m", "penstock.cli.main", "connector", "serve", "sqlite")


def call(address: str, data: bytes, **metadata: str) -> grpc.StatusCode:
    """Send one message to Validate, and return the status of the call."""
    options = [("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(address, options) as channel:
        method = channel.unary_unary("/materialize.Driver/Validate")
        with pytest.raises(grpc.RpcError) as failed:
            method(data, metadata=[*metadata.items()], timeout=120)
    return failed.value.code()


def peak_memory(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


def test_large_message_without_token_is_rejected_unread(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("open sesame")
    token.chmod(0o600)
    words = [*SERVED, "--listen", "127.0.0.1:0", "--token-file", str(token)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().split()[-1]
            before = peak_memory(process.pid)
            assert call(address, bytes(LARGE)) is grpc.StatusCode.UNAUTHENTICATED
            assert peak_memory(process.pid) - before < LARGE // 4
        finally:
            process.kill()


def test_message_above_limit_is_rejected(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MESSAGE_BYTES", 1 << 20)
    with serve(toy, f"unix:{tmp_path}/toy.sock") as served:
        assert call(served.address, bytes(2 << 20)) is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_streams_without_open_are_limited_by_peer(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "SILENT_STREAMS", 1)
    with serve(toy, f"unix:{tmp_path}/toy.sock") as served, connect(served.address) as connection:
        opened = ready(connection)
        silent = connection.transactions()
        until(lambda: len(served._streams._peers) == 1)
        with pytest.raises(ConnectorError, match="1 streams of this peer"):
            connection.transactions().receive()
        silent.cancel()
        until(lambda: not served._streams._peers)
        ready(connection).cancel()
        opened.cancel()
