"""A connector that is killed, overtaken, and checked: the other end of the pipe.

    python examples/connector_demo.py

A SQLite connector runs in a process of its own. Documents go to it over the
materialization protocol; it is killed with kill -9 amid a transaction; another takes up
at the last commit; the first one's late commit is refused. Then the conformance suite
asks it about the protocol.
"""

import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path

import pyarrow as pa

from penstock.data.packed import pack
from penstock.errors import PenstockError
from penstock.materialize import Stream, connect
from penstock.protocol.messages import (
    Acknowledge,
    Apply,
    Flush,
    Open,
    Opened,
    StartCommit,
    Store,
)
from penstock.protocol.ranges import WHOLE
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
    """Show it."""
    with tempfile.TemporaryDirectory(prefix="penstock-demo-") as name:
        show(Path(name))


def show(folder: Path) -> None:
    """Store, kill, take up, refuse; then check."""
    database = folder / "orders.db"
    spec = materialization(
        "demo/orders", {"path": str(database)}, bound(ORDERS, RESOURCE, ("orders",))
    )
    first, address = serving(folder, "first")
    with connect(address) as connection:
        print("the SQLite connector would run:")
        print(connection.apply(Apply(spec, "1", dry_run=True)).action_description.strip())
        connection.apply(Apply(spec, "1"))
        stream, checkpoint = opened(connection.transactions(), spec)
        commit(stream, range(1_000), 1.5, b"after 1,000")
        print(f"1,000 orders are committed: {rows(database)} rows")
        begin(stream)
        stream.send(store(range(500, 2_000), 9.9))
        first.kill()
        first.wait()
    print(f"killed with kill -9 amid the next transaction: {rows(database)} rows")

    second, address = serving(folder, "second")
    third, elsewhere = serving(folder, "third")
    with connect(address) as connection, connect(elsewhere) as other:
        stream, checkpoint = opened(connection.transactions(), spec)
        print(f"another one takes up {checkpoint.decode()!r}")
        commit(stream, range(500, 2_000), 9.9, b"after 2,000")
        newer, checkpoint = opened(other.transactions(), spec)
        print(f"a third one, in yet another process, takes up {checkpoint.decode()!r}")
        try:
            commit(stream, range(10), 0.0, b"too late")
        except PenstockError as error:
            print(f"the second one commits again, and is refused: {error}")
        else:
            raise SystemExit("the second one was not refused")
        commit(newer, range(2_000, 2_100), 1.0, b"after 2,100")
    for process in (second, third):
        process.terminate()
        process.wait()
    expected = 2_100
    if rows(database) != expected:
        raise SystemExit(f"there are {rows(database)} rows, not {expected}")
    print(f"every order is there once: {rows(database)} rows")

    config = conformance.parse(
        {
            "endpoint": {"path": str(folder / "checked.db")},
            "resource": {"table": "{name}"},
            "pattern": "remote-authoritative",
            "accepts_delete": True,
            "command": [*SERVE, "{address}"],
        }
    )
    few = ["spec-has-schemas", "load-returns-what-was-stored", "zombie-cannot-commit", "fence-join"]
    report = conformance.run(config, only=few)
    print(report.as_table())
    if report.failed:
        raise SystemExit(1)


def serving(folder: Path, name: str) -> tuple["subprocess.Popen[bytes]", str]:
    """A connector in a process of its own, and where it listens."""
    address = f"unix:{folder}/{name}.sock"
    process = subprocess.Popen([*SERVE, address], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    return process, address


def opened(stream: Stream, spec: MaterializationSpec) -> tuple[Stream, bytes]:
    """A stream that may write, and where it goes on."""
    stream.send(Open(spec, "1", WHOLE))
    answer = stream.receive()
    assert isinstance(answer, Opened)
    return stream, answer.checkpoint


def begin(stream: Stream) -> None:
    """The last commit is acknowledged, and nothing is to be loaded."""
    stream.send(Acknowledge())
    stream.receive()
    stream.send(Flush())
    stream.receive()


def commit(stream: Stream, ids: range, total: float, checkpoint: bytes) -> None:
    """One transaction."""
    begin(stream)
    stream.send(store(ids, total))
    stream.send(StartCommit(checkpoint))
    stream.receive()


def store(ids: range, total: float) -> Store:
    """Orders, packed."""
    count = len(ids)
    keys = pack([pa.array(ids, pa.int64())])
    values = pack([pa.array([total] * count)])
    none, new = pa.array([b""] * count, pa.binary()), pa.array([False] * count)
    return Store(0, keys, values, none, new)


def rows(database: Path) -> int:
    """How many orders there are."""
    connection = sqlite3.connect(database)
    [(count,)] = connection.execute("SELECT count(*) FROM orders")
    connection.close()
    return int(count)


if __name__ == "__main__":
    main()
