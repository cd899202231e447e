"""One Postgres server for the tests of several processes.

`share` writes the attributes of a running server to a file and names it in an environment
variable; `shared` returns a server with these attributes, to connect to and not to stop.
"""

import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from penstock.servers.postgres import PostgresServer

QUICK: Final = {"fsync": "off", "max_replication_slots": 40, "max_wal_senders": 40}

VARIABLE: Final = "PENSTOCK_TEST_POSTGRES_SERVER"


@contextmanager
def share() -> Iterator[None]:
    """Start a server for this process and its children."""
    with PostgresServer(settings=QUICK) as server:
        attributes = {name: value for name, value in vars(server).items() if name != "_process"}
        path = server.folder / "attributes.pickle"
        path.write_bytes(pickle.dumps(attributes))
        os.environ[VARIABLE] = str(path)
        try:
            yield
        finally:
            del os.environ[VARIABLE]


def shared() -> PostgresServer | None:
    """Return the server that a parent process shares, if one does."""
    path = os.environ.get(VARIABLE)
    if path is None:
        return None
    server = PostgresServer.__new__(PostgresServer)
    vars(server).update(pickle.loads(Path(path).read_bytes()))
    return server
