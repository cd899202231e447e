"""Output of gRPC: its failures are reported only by our errors."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TAKEN = """
import socket
from penstock.errors import UsageError
from penstock.sdk import serve
from tests.sdk.toy import Toy

with socket.create_server(("127.0.0.1", 0)) as taken:
    try:
        serve(Toy(), f"127.0.0.1:{taken.getsockname()[1]}")
    except UsageError as error:
        print(error)
"""
NO_TLS = """
import socket, threading
from penstock.materialize import connect
from penstock.materialize.errors import ConnectorUnreachable
from penstock.protocol.transport_security import Security

def answer(other):
    while True:
        line, _ = other.accept()
        line.sendall(b"no TLS is spoken here\\r\\n" * 10)

with socket.create_server(("127.0.0.1", 0)) as other:
    threading.Thread(target=answer, args=(other,), daemon=True).start()
    from tests.certificates import authority
    from pathlib import Path
    import tempfile
    with tempfile.TemporaryDirectory() as folder:
        ours = authority(Path(folder), "ours")
        with connect(f"localhost:{other.getsockname()[1]}", Security(ours)) as connection:
            try:
                connection.spec()
            except ConnectorUnreachable as error:
                print(error)
"""


@pytest.mark.parametrize(
    ("code", "says"),
    [(TAKEN, "cannot listen on"), (NO_TLS, "no answer from the connector")],
    ids=["a taken port", "no TLS"],
)
def test_only_our_error_is_printed(code, says):
    env = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        env=env,
        check=True,
    )
    assert says in done.stdout
    assert done.stderr == ""
