"""The demo's shop in a server of its own, and the file that follows it into SQLite."""

import random
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from penstock.clock import SYSTEM_CLOCK
from penstock.demo.comparing import Places
from penstock.demo.running import pipeline_text
from penstock.demo.shop import BOOKS, Books, Traffic, open_shop, what_is_wrong
from penstock.testing.postgres import Database, PostgresServer
from tests.fix_postgres import QUICK

LOOK_MS: Final = 150


@dataclass(frozen=True)
class Stage:
    """Where everything is."""

    folder: Path
    server: PostgresServer
    database: Database
    places: Places
    traffic: Traffic

    @property
    def file(self) -> Path:
        return self.folder / "pipeline.yaml"


@contextmanager
def staged(folder: Path, chance: random.Random, rate: float = 50) -> Iterator[Stage]:
    """A shop that is open, and a file; traffic is not yet started."""
    with PostgresServer(settings=QUICK) as server:
        database = server.create_database("shop")
        places = Places(database.url(), f"file:{folder}/lake", folder / "shop.db")
        open_shop(places.postgres)
        (folder / "pipeline.yaml").write_text(f"{pipeline_text(places)}retain: 1m\n")
        traffic = Traffic(places.postgres, chance, rate)
        try:
            yield Stage(folder, server, database, places, traffic)
        finally:
            traffic.end()


class Reader:
    """Somebody who looks at the books in SQLite all the time, each time in one transaction."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._read, name="reader", daemon=True)
        self.looks = 0
        self.commits = 0
        """Looks that found something else than the one before."""

        self.wrong = ""
        """What the first look found that did not add up."""

        self._last: object = None
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join()

    def _read(self) -> None:
        while not SYSTEM_CLOCK.wait(self._over, LOOK_MS):
            found = _look(self._path)
            # Tables are made before there are rows; once there are some, they stay.
            if found is not None and (self.looks or found[0][3]):
                self.looks += 1
                self.commits += found != self._last
                self._last = found
                self.wrong = self.wrong or what_is_wrong(found[0])


def _look(path: Path) -> tuple[Books, object] | None:
    """The books, and the number of the last order; nothing if nobody may look now."""
    if not path.exists():
        return None
    try:
        with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True, timeout=1)) as target:
            target.execute("BEGIN")
            books: Books = target.execute(BOOKS).fetchone()
            (last,) = target.execute("SELECT max(id) FROM orders").fetchone()
    except sqlite3.OperationalError:
        return None  # There are no tables yet, or they are being written.
    return books, last
