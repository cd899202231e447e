"""A SQLite connector that is killed, fenced and checked.

    python examples/connector_demo.py

The connector runs in a child process and receives documents over the materialization
protocol. It is killed with `kill -9` during a transaction, and a second process resumes at the
last commit. A third process fences the second, whose next commit is rejected. At the end the
conformance suite runs some of its checks.
"""

import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path

import pyarrow as pa

from penstock.data.packed import pack
from penstock.errors import PenstockError
from penstock.materialize import ConnectorStream, connect
from penstock.protocol.key_range import WHOLE
from penstock.protocol.messages import (
    Acknowledge,
    Apply,
    Flush,
    Open,
    Opened,
    StartCommit,
    Store,
)
from penstock.protocol.specs import MaterializationSpec
from penstock.testing import conformance
from penstock.testing.specs import bound, collection, materialization, projection

ORDERS = collection(
    "shop/orders",
    projection("id", "integer", must=True),
    projection("total", "number", must=True),
    document=False,
)
RESOURCE = {"table": "orders", "document": False}
SERVE = [sys.executable, "-m", "penstock.cli.main", "connector", "serve", "sqlite", "--listen"]


def main() -> None:
    """Run the example in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="penstock-demo-") as name:
        show(Path(name))


def show(folder: Path) -> None:
    """Store, kill, resume, fence; then run conformance checks."""
    database = folder / "orders.db"
    spec = materialization(
        "demo/orders", {"path": str(database)}, bound(ORDERS, RESOURCE, ("orders",))
    )
    first, address = serve(folder, "first")
    with connect(address) as connection:
        print("Apply of the SQLite connector would run:")
        print(connection.apply(Apply(spec, "1", dry_run=True)).action_description.strip())
        connection.apply(Apply(spec, "1"))
        stream, checkpoint = open_stream(connection.transactions(), spec)
        commit(stream, range(1_000), 1.5, b"after 1,000")
        print(f"1,000 orders committed: {count_rows(database)} rows")
        begin(stream)
        stream.send(store(range(500, 2_000), 9.9))
        first.kill()
        first.wait()
    print(f"killed with kill -9 during the next transaction: {count_rows(database)} rows")

    second, address = serve(folder, "second")
    third, other_address = serve(folder, "third")
    with connect(address) as connection, connect(other_address) as other:
        stream, checkpoint = open_stream(connection.transactions(), spec)
        print(f"the second process resumes at {checkpoint.decode()!r}")
        commit(stream, range(500, 2_000), 9.9, b"after 2,000")
        newer, checkpoint = open_stream(other.transactions(), spec)
        print(f"the third process resumes at {checkpoint.decode()!r}")
        try:
            commit(stream, range(10), 0.0, b"too late")
        except PenstockError as error:
            print(f"the next commit of the second process is rejected: {error}")
        else:
            raise SystemExit("the commit of the second process was not rejected")
        commit(newer, range(2_000, 2_100), 1.0, b"after 2,100")
    for process in (second, third):
        process.terminate()
        process.wait()
    expected = 2_100
    if count_rows(database) != expected:
        raise SystemExit(f"SQLite has {count_rows(database)} rows instead of {expected}")
    print(f"every order is in SQLite exactly once: {count_rows(database)} rows")

    config = conformance.parse(
        {
            "endpoint": {"path": str(folder / "checked.db")},
            "resource": {"table": "{name}"},
            "pattern": "remote-authoritative",
            "accepts_delete": True,
            "command": [*SERVE, "{address}"],
        }
    )
    checks = [
        "spec-returns-json-schemas",
        "load-returns-stored-document",
        "zombie-cannot-commit",
        "joined-shard-resumes-from-last-checkpoint",
    ]
    report = conformance.run(config, only=checks)
    print(report.as_table())
    if report.failed:
        raise SystemExit(1)


def serve(folder: Path, name: str) -> tuple["subprocess.Popen[bytes]", str]:
    """Start a connector as a child process, and return the process and its address."""
    address = f"unix:{folder}/{name}.sock"
    process = subprocess.Popen([*SERVE, address], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    return process, address


def open_stream(
    stream: ConnectorStream, spec: MaterializationSpec
) -> tuple[ConnectorStream, bytes]:
    """Send Open, and return the stream and the checkpoint of the endpoint."""
    stream.send(Open(spec, "1", WHOLE))
    response = stream.receive()
    assert isinstance(response, Opened)
    return stream, response.checkpoint


def begin(stream: ConnectorStream) -> None:
    """Acknowledge the last commit, and flush without loads."""
    stream.send(Acknowledge())
    stream.receive()
    stream.send(Flush())
    stream.receive()


def commit(stream: ConnectorStream, ids: range, total: float, checkpoint: bytes) -> None:
    """Run one transaction."""
    begin(stream)
    stream.send(store(ids, total))
    stream.send(StartCommit(checkpoint))
    stream.receive()


def store(ids: range, total: float) -> Store:
    """Return a Store of orders with these ids."""
    count = len(ids)
    keys = pack([pa.array(ids, pa.int64())])
    values = pack([pa.array([total] * count)])
    none, new = pa.array([b""] * count, pa.binary()), pa.array([False] * count)
    return Store(0, keys, values, none, new)


def count_rows(database: Path) -> int:
    """Return the number of orders in SQLite."""
    connection = sqlite3.connect(database)
    [(count,)] = connection.execute("SELECT count(*) FROM orders")
    connection.close()
    return int(count)


if __name__ == "__main__":
    main()
