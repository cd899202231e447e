"""In-memory cluster, Debezium connector that writes to it, and tasks that read it.

Only the broker, the JVM and Spark are replaced. Ticks, side state and collections are real, in
an in-memory storage location.
"""

import itertools
import json
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import pyarrow as pa

from penstock import persist
from penstock.data.remap_form import KAFKA_TOPICS
from penstock.ingest.scan_task import Scanned, ScanTask
from penstock.ingest.snapshot_loader import SnapshotLoader
from penstock.ingest.tick_transaction import TickTransaction
from penstock.persist import AppendTo
from penstock.persist.state_store import StateStore
from penstock.progress import Frontier
from penstock.reclock import Minted, accumulate, mint
from penstock.sources.kafka.cluster import Topic
from penstock.sources.kafka.config import KafkaConfig
from penstock.sources.kafka.format_spec import FormatSpec
from penstock.sources.kafka.source import KafkaSource
from penstock.testing.clocks import ManualClock

TOPICS = ("shop.public.a", "shop.public.b")
TX = "shop.transaction"
PARTITIONS = 2

Kind: TypeAlias = Literal["postgresql", "oracle", "informix"]
"""Database kind of a connector; determines the form of its transaction ids."""

_SPARKS = pa.schema(
    [
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("timestamp", pa.timestamp("us", "UTC")),
    ]
)
_LAST = 99
"""Position of an END in its transaction."""

_numbers = itertools.count()


@dataclass
class MemoryCluster:
    """Records by topic and partition."""

    logs: dict[str, list[list[bytes | None]]] = field(default_factory=dict)
    lives: dict[str, int] = field(default_factory=dict)
    """Number of times each topic was created."""

    def make(self, topic: str, partitions: int) -> None:
        self.logs[topic] = [[] for _ in range(partitions)]
        self.lives[topic] = self.lives.get(topic, 0) + 1

    def send(self, topic: str, partition: int, value: Any) -> tuple[str, int]:
        """Append a record;

        return its partition as remap names it, and the offset after the record.
        """
        log = self.logs[topic][partition]
        log.append(None if value is None else json.dumps(value).encode())
        return f"{topic}-{partition}", len(log)

    def ends(self) -> dict[str, int]:
        return {
            f"{topic}-{number}": len(log)
            for topic, logs in self.logs.items()
            for number, log in enumerate(logs)
        }


class MemoryClusterClient:
    """Topic metadata of the cluster, in the form of the real client."""

    def __init__(self, cluster: MemoryCluster, config: KafkaConfig) -> None:
        self._cluster = cluster
        self._topic = config.topic

    @property
    def _logs(self) -> list[list[bytes | None]]:
        return self._cluster.logs[self._topic]

    def open(self) -> None: ...

    def close(self) -> None: ...

    def topic(self, *, known: bool = False) -> Topic:
        life = self._cluster.lives[self._topic]
        return Topic(f"{life} of {self._topic}", tuple(range(len(self._logs))))

    def stable_ends(self, partitions: Sequence[int]) -> dict[int, int]:
        return {each: len(self._logs[each]) for each in partitions}

    ends = stable_ends

    def beginnings(self, partitions: Sequence[int]) -> dict[int, int]:
        return dict.fromkeys(partitions, 0)

    def is_compacted(self) -> bool:
        return False


class InProcess:
    """Run the tasks of a scan one after the other; `places` tasks finish records by key."""

    def __init__(self, cluster: MemoryCluster, *, places: int) -> None:
        self._cluster = cluster
        self._places = places

    def scan(self, task: ScanTask, _watch: Any) -> list[Scanned]:
        assert task.shares, "Spark's tasks write to some collection"
        batches = [*self._batches(task.scan.options)]
        if self._places == 1:
            return [task.run(batches)]
        cut: dict[int, list[pa.Table]] = {}
        for batch in batches:  # One task per batch.
            for place, table in task.cut([batch], self._places):
                cut.setdefault(place, []).append(table)
        return [task.finish(tables) for tables in cut.values()]

    def _batches(self, options: Mapping[str, str]) -> Iterator[pa.RecordBatch]:
        first, upper = (json.loads(options[name]) for name in ("startingOffsets", "endingOffsets"))
        for topic, partitions in first.items():
            for partition, start in partitions.items():
                log = self._cluster.logs[topic][int(partition)]
                rows = [
                    (b"k", log[offset], topic, int(partition), offset, 0)
                    for offset in range(start, upper[topic][partition])
                ]
                columns = [*zip(*rows, strict=True)] or [()] * len(_SPARKS)
                arrays = [
                    pa.array(each, kind.type) for each, kind in zip(columns, _SPARKS, strict=True)
                ]
                yield pa.record_batch(arrays, schema=_SPARKS)


class Lake:
    """Storage location and a source that is read into it tick by tick."""

    def __init__(self, cluster: MemoryCluster, *, places: int = 1, **options: Any) -> None:
        self.cluster = cluster
        given = {
            "topics": dict.fromkeys(TOPICS),
            "transactions": TX,
            "envelope": "debezium",
            "key": ("id",),
            **options,
        }
        value = FormatSpec("json", columns={"id": "bigint", "n": "bigint"})
        self.config = KafkaConfig("nowhere:9092", "", value, **given)
        self.url = f"memory:transactions-{next(_numbers)}/shop"
        self.clock = ManualClock(1_700_000_000_000)
        self.jobs: Any = InProcess(cluster, places=places)
        self.client: persist.Client
        self.open()

    def open(self) -> None:
        """Start from the durable state."""
        settings = persist.Settings(background=False)
        self.client = persist.open(self.url, writer="test", settings=settings)
        self._remap = self.client.create_or_load("cdc_remap", schema=KAFKA_TOPICS.remap, owner="c")
        self._memory = StateStore(self.client, "cdc")
        self._loader = SnapshotLoader(self.client, "cdc", jobs=self.jobs)
        self._pool = ThreadPoolExecutor(1)
        upper = self._remap.upper
        rows = self._remap.snapshot(upper - 1).arrow() if upper else None
        self.bound = None if rows is None else accumulate(KAFKA_TOPICS, rows)
        self.source = KafkaSource(
            "cdc",
            self.config,
            clock=self.clock,
            cluster=lambda config: MemoryClusterClient(self.cluster, config),  # type: ignore[arg-type,return-value]
        )
        self.source.open(self._memory, self._loader, self.bound)

    def drop_removed(self) -> None:
        """Drop the collections of topics that the configuration no longer names."""

        def destroy(names: Sequence[str]) -> None:
            self.client.destroy(*names)

        self.source.drop_removed(self._memory, destroy)

    def close(self) -> None:
        """Stop the source and close the storage location."""
        self._pool.shutdown()
        self._loader.close()
        self.client.close()

    def tick(self, up_to: Mapping[str, int] | None = None) -> None:
        """Read everything available, or everything below `up_to`."""
        self.clock.move_ms(1_000)
        probed = self.source.probe().frontier
        time = self.clock.now_ms()
        tick = TickTransaction(self.client, "cdc", self._memory, time, self._loader, self._pool)
        try:
            reached = self.source.read_into(tick, probed if up_to is None else Frontier(up_to))
            assert reached is not None
            minted = mint(KAFKA_TOPICS, self.bound or Frontier(), reached, time=time)
            updates = [minted.updates] if isinstance(minted, Minted) else []
            bind = AppendTo(self._remap, updates, self._remap.upper, time + 1)
            tick.commit(self.source.collections(), bind)
        finally:
            tick.close()
        self.bound = reached
        self.source.committed(reached)

    def contents(self) -> dict[str, dict[int, int]]:
        """Return the visible rows, by topic and id."""
        return {topic: self.rows(f"cdc.{topic}") for topic in self.config.topics}

    def rows(self, collection: str) -> dict[int, int]:
        found = self.client.collection(collection)
        rows = found.snapshot(found.upper - 1).arrow().to_pylist()
        assert len({row["id"] for row in rows}) == len(rows)
        return {row["id"]: row["n"] for row in rows}

    def hidden(self) -> list[str]:
        """Return the names of the side-state collections."""
        return [each for each in self.client.collections(hidden=True) if "/pending/" in each]


@dataclass
class Sent:
    """Transaction as sent: its changes, and the offset that each partition needs to complete it."""

    changes: list[tuple[str, int, int | None]]
    needs: dict[str, int] = field(default_factory=dict)


class Connector:
    """Write transactions as Debezium does."""

    def __init__(
        self, cluster: MemoryCluster, kind: Kind = "postgresql", *, numbers: int = 1 << 32
    ) -> None:
        """`numbers` is the count of transaction numbers before they wrap around."""
        self.cluster = cluster
        self.kind = kind
        self.numbers = numbers
        self.sent: list[Sent] = []
        self.state: dict[str, dict[int, int]] = {topic: {} for topic in TOPICS}
        self.snapshot: list[tuple[str, int, str, int, int]] = []
        """Rows of the initial snapshot: topic, id, partition, offset and value."""

        for topic in TOPICS:
            cluster.make(topic, PARTITIONS)
        cluster.make(TX, 1)

    def read(self, topic: str, id: int, n: int) -> None:
        """Send a row of the initial snapshot."""
        self.state[topic][id] = n
        where, offset = self._send(topic, id, {"op": "r", "after": {"id": id, "n": n}})
        self.snapshot.append((topic, id, where, offset, n))

    def read_again(self, topic: str, id: int) -> None:
        """Send the current row, as an incremental snapshot does."""
        if (n := self.state[topic].get(id)) is not None:
            self._send(topic, id, {"op": "r", "after": {"id": id, "n": n}})

    def commit(self, changes: Iterable[tuple[str, int, int | None]]) -> Sent:
        """Send a complete transaction."""
        sent = Sent([*changes])
        self.sent.append(sent)
        for topic, id, n in sent.changes:
            if n is None:
                self.state[topic].pop(id, None)
            else:
                self.state[topic][id] = n
        self.resend(len(self.sent) - 1)
        return sent

    def resend(self, number: int, *, up_to: int | None = None) -> None:
        """Send a transaction, or its first messages, again or for the first time."""
        sent = self.sent[number]
        for message in [*self._messages(number)][:up_to]:
            where, offset = message()
            sent.needs.setdefault(where, 0)
            if not getattr(sent, "done", False):
                sent.needs[where] = offset
        if up_to is None:
            sent.done = True  # type: ignore[attr-defined]

    def _messages(self, number: int) -> Iterator[Any]:
        counts = dict.fromkeys(TOPICS, 0)
        sent = self.sent[number]
        begin = {"status": "BEGIN", "id": self._id(number, 1), "ts_ms": 1}
        yield lambda: self.cluster.send(TX, 0, begin)
        for at, (topic, id, n) in enumerate(sent.changes, 1):
            counts[topic] += 1
            event = {
                "op": "d" if n is None else "u",
                "before": {"id": id, "n": 0} if n is None else None,
                "after": None if n is None else {"id": id, "n": n},
                "transaction": {
                    "id": self._id(number, at),
                    "total_order": at,
                    "data_collection_order": counts[topic],
                },
                "source": {
                    "connector": self.kind,
                    "ts_ms": 1_000 + number,
                    "sequence": json.dumps([str(number * 100), str(number * 100 + at)]),
                },
            }
            yield lambda topic=topic, id=id, event=event: self._send(topic, id, event)
        collections = [
            {"data_collection": topic.removeprefix("shop."), "event_count": count}
            for topic, count in counts.items()
            if count
        ] + [{"data_collection": "public.not_followed", "event_count": 7}]
        end = {
            "status": "END",
            "id": self._id(number, _LAST),
            "event_count": 7,
            "data_collections": collections,
        }
        yield lambda: self.cluster.send(TX, 0, end)

    def _id(self, number: int, at: int) -> str:
        """Return the transaction id of the record at position `at` in the transaction."""
        if self.kind == "oracle":
            return f"5.6.{number}"
        at = at if self.kind == "postgresql" else _LAST
        return f"{number % self.numbers}:{number * 100 + at}"

    def _send(self, topic: str, id: int, event: Any) -> tuple[str, int]:
        return self.cluster.send(topic, id % PARTITIONS, event)


def random_history(rng: random.Random) -> Connector:
    """Return a connector after a random history of a snapshot, transactions and restarts."""
    kind: Kind = rng.choice(["postgresql", "oracle", "informix"])
    made = Connector(MemoryCluster(), kind, numbers=3 if kind == "informix" else 1 << 32)
    for id in range(rng.randrange(4)):
        made.read(rng.choice(TOPICS), id, -1 - id)
    for n in range(rng.randrange(1, 8)):
        made.commit(
            (
                rng.choice(TOPICS),
                rng.randrange(4),
                None if rng.random() > 0.75 else 100 * n + at,
            )
            for at in range(rng.randrange(5))
        )
        if rng.random() > 0.8:
            made.read_again(rng.choice(TOPICS), rng.randrange(4))
        if rng.random() > 0.7:
            back = rng.randrange(1, 3)
            for number in range(max(0, n + 1 - back), n + 1):
                made.resend(number)
    return made
