"""A bank whose documents contain their expected values, and its contents at each tick.

    accounts   a table: rows are updated, opened and closed; their sum is always the same
    log        append-only: one document for each posting
    balances   summed: the same postings by account, reduced

A document is `id, seq, amount, oracle`. `seq` counts the versions of an id, so a duplicate or
an older version is visible in the document alone. `oracle` is the value of `amount` after all
documents up to this one.

Each step opens an account that the next step closes. A runtime that crashes in one step and
continues with both as one interval sees an account that was opened and closed.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import pyarrow as pa

from penstock import persist
from penstock.clock import SystemClock
from penstock.data import DIFF, TIME
from penstock.persist import AppendTo
from penstock.persist.client import Client

ACCOUNTS: Final = 6
TOTAL: Final = 600
TICKS: Final = 3
"""Number of times in one step."""

SCHEMA: Final = pa.schema(
    [pa.field(name, pa.int64(), nullable=False) for name in ("id", "seq", "amount", "oracle")]
)

SUMMED: Final[Mapping[str, Any]] = {
    "key": ["/id"],
    "order": ["seq"],
    "schema": {
        "type": "object",
        "properties": {
            "id": {"type": "integer"},
            "seq": {"type": "integer", "reduce": {"strategy": "maximize"}},
            "amount": {"type": "integer", "reduce": {"strategy": "sum"}},
            "oracle": {"type": "integer", "reduce": {"strategy": "lastWriteWins"}},
        },
        "required": ["id", "seq", "amount", "oracle"],
        "reduce": {"strategy": "merge"},
    },
}
"""Section of the collection of postings in the pipeline file."""


class Advanced(SystemClock):
    """Clock that runs ahead."""

    ahead_ms = 0

    def boot_ms(self) -> int:
        return super().boot_ms() + self.ahead_ms


class Doc(NamedTuple):
    """Document of any collection."""

    id: int
    seq: int
    amount: int
    oracle: int


@dataclass(frozen=True, slots=True)
class Contents:
    """Expected contents as of one time, by collection."""

    accounts: Mapping[int, Doc]
    log: Mapping[int, Doc]
    balances: Mapping[int, Doc]

    def of(self, what: str) -> Mapping[int, Doc]:
        return {"accounts": self.accounts, "log": self.log, "balances": self.balances}[what]


EMPTY: Final = Contents({}, {}, {})


@dataclass(frozen=True, slots=True)
class Bound:
    """Collection bound to a resource."""

    what: str
    delta: bool = False

    @property
    def resource(self) -> str:
        return f"{self.what}_delta" if self.delta else self.what

    @property
    def collection(self) -> str:
        return f"bank.{'postings' if self.what == 'balances' else self.what}"


@dataclass
class Bank:
    """Collections of the bank, their writer and their history."""

    url: str
    rng: random.Random
    at: dict[int, Contents] = field(default_factory=dict)
    """Expected contents by time."""

    versions: set[Doc] = field(default_factory=set)
    """All versions of rows of the accounts."""

    def __post_init__(self) -> None:
        self.clock = Advanced()
        settings = persist.Settings(clock=self.clock)
        self.client: Client = persist.open(self.url, writer="bank", settings=settings)
        make = self.client.create_or_load
        self._accounts = make("bank.accounts", schema=SCHEMA, key_columns=["id"])
        self._log = make("bank.log", schema=SCHEMA, key_columns=["id"])
        self._postings = make("bank.postings", schema=SCHEMA, key_columns=["id", "seq"])
        self._held: dict[int, int] = {}
        self._seqs: dict[int, int] = {}
        self._now = EMPTY
        self._posted: list[tuple[Doc, Doc]] = []
        self._opened: int | None = None
        self._ids = iter(range(100, 1_000_000))

    @property
    def upper(self) -> int:
        return self._accounts.upper

    def close(self) -> None:
        self.client.close()

    def step(self) -> int:
        """Post for some ticks; return the new upper."""
        lower = self.upper
        accounts: list[tuple[int, ...]] = []
        postings: list[tuple[int, ...]] = []
        log: list[tuple[int, ...]] = []
        for tick in range(TICKS):
            time, before = lower + tick, self._now
            self._post(first=not before.accounts, middle=tick == 1)
            after = self._contents()
            for id in sorted(before.accounts.keys() | after.accounts.keys()):
                was, now = before.accounts.get(id), after.accounts.get(id)
                if was != now:
                    accounts += [(*was, time, -1)] if was is not None else []
                    accounts += [(*now, time, +1)] if now is not None else []
            for posting, entry in self._posted:
                postings.append((*posting, time, +1))
                log.append((*entry, time, +1))
            self._posted = []
            self.at[time] = self._now = after
            self.versions |= set(after.accounts.values())
        upper = lower + TICKS
        written = zip(
            (self._accounts, self._log, self._postings), (accounts, log, postings), strict=True
        )
        self.client.append_all(
            [AppendTo(collection, _table(rows), lower, upper) for collection, rows in written]
        )
        return upper

    def outlast_leases(self) -> None:
        """Compact the history that only killed readers held."""
        self.compact()
        self.clock.ahead_ms += 2 * persist.Settings().lease_ms
        self.compact()

    def compact(self) -> None:
        """Compact all history that is not held."""
        for collection in (self._accounts, self._log, self._postings):
            collection.allow_compaction(collection.upper - 1).result()
        self.client.compact()

    def as_of(self, frontier: int) -> Contents:
        """Return the expected contents at a frontier."""
        return self.at[frontier - 1] if frontier else EMPTY

    def _post(self, *, first: bool, middle: bool) -> None:
        if first:
            for id in range(ACCOUNTS):
                self._entry(id, TOTAL // ACCOUNTS)
            return
        for _ in range(2):
            one, other = self.rng.sample(range(ACCOUNTS), 2)
            self._transfer(one, other, self.rng.randrange(1, 20))
        if middle:
            opened = next(self._ids)
            self._transfer(0, opened, 7)
            if self._opened is not None:
                self._transfer(self._opened, 1, self._held[self._opened])
                del self._held[self._opened]
            self._opened = opened

    def _transfer(self, one: int, other: int, amount: int) -> None:
        self._entry(one, -amount)
        self._entry(other, amount)

    def _entry(self, id: int, delta: int) -> None:
        self._held[id] = self._held.get(id, 0) + delta
        self._seqs[id] = self._seqs.get(id, 0) + 1
        number = sum(self._seqs.values())
        self._posted.append(
            (Doc(id, self._seqs[id], delta, self._held[id]), Doc(number, 1, delta, delta))
        )

    def _contents(self) -> Contents:
        accounts = {id: Doc(id, self._seqs[id], held, held) for id, held in self._held.items()}
        log, balances = dict(self._now.log), dict(self._now.balances)
        for posting, entry in self._posted:
            log[entry.id] = entry
            balances[posting.id] = Doc(posting.id, posting.seq, posting.oracle, posting.oracle)
        return Contents(accounts, log, balances)


def _table(rows: Sequence[tuple[int, ...]]) -> pa.Table:
    schema = SCHEMA.append(pa.field(TIME, pa.int64())).append(pa.field(DIFF, pa.int64()))
    columns = list(zip(*rows, strict=True)) if rows else [() for _ in schema]
    return pa.table([pa.array(each, pa.int64()) for each in columns], names=schema.names)
