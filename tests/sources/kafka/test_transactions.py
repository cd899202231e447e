"""Transactions over several topics: atomic, in order, each at one time."""

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import DefiniteError, PenstockError, UsageError
from penstock.pipeline.sections.kafka import KafkaSection, build_kafka_config
from penstock.progress import Frontier
from penstock.sources.debezium.buffer import TransactionBuffer
from penstock.sources.debezium.transactions import (
    MARKERS,
    RUNS,
    Transactions,
    match_topics,
    merge_runs,
)
from penstock.sources.kafka.config import KafkaConfig
from penstock.sources.kafka.format_spec import FormatSpec
from penstock.sources.kafka.source import KafkaSource
from tests.sources.kafka.connector import (
    TOPICS,
    TX,
    Connector,
    Kind,
    Lake,
    MemoryCluster,
    random_history,
)

A, B = TOPICS


def expected_rows(made: Connector, below: dict[str, int]) -> dict[str, dict[int, int]]:
    """Return the rows to be seen after a read of everything `below`:

    a prefix of the transactions.
    """
    found: dict[str, dict[int, int]] = {topic: {} for topic in TOPICS}
    for topic, id, where, offset, n in made.snapshot:
        if offset <= below.get(where, 0):
            found[topic][id] = n
    for sent in made.sent:
        if any(offset > below.get(where, 0) for where, offset in sent.needs.items()):
            break
        for topic, id, changed in sent.changes:
            if changed is None:
                found[topic].pop(id, None)
            else:
                found[topic][id] = changed
    return found


def anywhere(made: Connector, lake: Lake, rng: random.Random) -> Iterator[dict[str, int]]:
    """Run ticks with random ends and restarts; yield the end of each."""
    ends = made.cluster.ends()
    below = dict.fromkeys(ends, 0)
    while below != ends:
        below = {
            # The smallest draw makes the longest step, thus examples shrink to few ticks.
            each: offset + (most := min(4, ends[each] - offset)) - rng.randrange(1 + most)
            for each, offset in below.items()
        }
        lake.tick(below)
        yield below
        if rng.random() > 0.7:
            lake.close()
            lake.open()
    assert lake.contents() == made.state
    assert lake.source.status()["waits_for"] == ""
    assert lake.source.status()["waiting_events"] == 0


def follow(rng: random.Random) -> None:
    """Ingest a random history and compare the contents after each tick."""
    made = random_history(rng)
    lake = Lake(made.cluster, places=rng.choice([1, 3]))
    try:
        for below in anywhere(made, lake, rng):
            assert lake.contents() == expected_rows(made, below)
    finally:
        lake.close()


def follow_many() -> None:
    for seed in range(60):
        follow(random.Random(seed))


@settings(deadline=None, max_examples=40)
@given(rng=st.randoms(use_true_random=False))
def test_every_tick_shows_a_prefix_of_complete_transactions(rng: random.Random) -> None:
    follow(rng)


def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Apply events before their END."""
    real = KafkaSource._scan

    def scan(self: Any, ranges: Any) -> Any:
        scan = real(self, ranges)
        for topic_scan in scan.topics.values():
            object.__setattr__(topic_scan, "last_waiting", None)
        return scan

    monkeypatch.setattr(KafkaSource, "_scan", scan)


def any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Apply every complete transaction, without regard to order."""
    monkeypatch.setattr(
        Transactions,
        "ready",
        lambda self: [
            name for name, end in self._ended.items() if not self._missing_events(name, end)
        ],
    )


def forgetful(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drop the transaction buffer at a restart."""
    monkeypatch.setattr(TransactionBuffer, "load", lambda _self, tick: tick.retain_side_rows(set()))


def uncounted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count a duplicate event twice."""
    monkeypatch.setattr(
        "penstock.sources.debezium.transactions.merge_runs", lambda runs: runs.combine_chunks()
    )


def matched_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Assign records with different ids to different transactions."""
    monkeypatch.setattr(
        "penstock.sources.debezium.transaction_ids._WITH_POSITION", "^(?P<name>)(?P<position>)$"
    )


def matched_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Merge transactions with the same number."""
    monkeypatch.setattr("penstock.sources.debezium.transaction_ids.join", lambda id: id)
    monkeypatch.setattr("penstock.sources.debezium.envelope.join_array", lambda ids: ids)


@pytest.mark.parametrize(
    "plant", [at_once, any_order, forgetful, uncounted, matched_whole, matched_by_number]
)
def test_planted_bug_in_transaction_order_or_matching_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, PenstockError)):
        follow_many()


@pytest.fixture
def made() -> Connector:
    return Connector(MemoryCluster())


@pytest.fixture
def lake(made: Connector) -> Any:
    found = Lake(made.cluster)
    yield found
    found.close()


def test_missing_end_of_transaction_stalls_source_and_is_reported(
    made: Connector, lake: Lake
) -> None:
    made.commit([(A, 1, 1)])
    made.sent.append(type(made.sent[0])([(A, 1, 2), (B, 1, 2)]))
    made.resend(1, up_to=3)
    made.commit([(B, 7, 7)])
    lake.tick()
    began = lake.clock.now_ms()
    assert lake.contents() == {A: {1: 1}, B: {}}
    lake.tick()
    lake.close()
    lake.open()
    lake.tick()
    status = lake.source.status()
    assert status["waits_for"].startswith('the END of transaction "1", since 2023-11-14T')
    assert status["waits_for"].endswith("; 3 wait")
    assert status["waiting_events"] == 3
    assert lake._memory.get("waits") == {"for": "1", "since": began}
    made.resend(1)
    lake.tick()
    assert lake.contents() == {A: {1: 2}, B: {1: 2, 7: 7}}
    assert lake.source.status()["waits_for"] == ""


def test_missing_events_of_transaction_are_reported(made: Connector, lake: Lake) -> None:
    made.commit([(A, 1, 1), (A, 2, 1), (B, 1, 1)])
    lake.tick({f"{A}-0": 0, f"{A}-1": 1, f"{B}-0": 0, f"{B}-1": 0, f"{TX}-0": 2})
    assert lake.contents() == {A: {}, B: {}}
    message = lake.source.waits_for()
    assert f'1 of 2 in topic "{A}", 1 of 1 in topic "{B}"' in message


def test_applied_transactions_are_removed_from_side_state(made: Connector, lake: Lake) -> None:
    for n in range(3):
        made.commit([(A, n, n), (B, n, n)])
        lake.tick()
    there = lake.hidden()
    for n in range(3, 6):
        made.commit([(A, n, n), (B, n, n)])
        lake.tick()
    assert lake.hidden() == there
    for name in there:
        rows = sum(part.num_rows for part in lake.client.collection(name).parts())
        assert rows == (6 if "applied" in name else 0)


RECORDED = Path(__file__).with_name("debezium_postgres.json")
"""Recorded output of the Debezium 3.6.3 engine for Postgres.

Its settings are the defaults, with `provide.transaction.metadata=true` and without tombstones.
`source` has only the fields that are read. Transactions 728 and 729 ran concurrently. After that
the engine was restarted with offsets from the middle of 728.
"""


def test_recorded_debezium_postgres_output_is_applied_transaction_by_transaction() -> None:
    orders, lines = "shop.public.orders", "shop.public.lines"
    cluster = MemoryCluster()
    for topic in (orders, lines, TX):
        cluster.make(topic, 1)
    lake = Lake(cluster, topics={orders: None, lines: None})
    seen: list[Any] = []
    for record in json.loads(RECORDED.read_text()):
        if record["topic"] in cluster.logs:
            cluster.send(record["topic"], 0, record["value"])
        lake.tick()
        if (found := lake.contents()) not in seen[-1:]:
            seen.append(found)
    assert seen == [
        {orders: {1: 10}, lines: {}},
        {orders: {1: 10, 3: 30}, lines: {3: 31}},
        {orders: {1: 10, 2: 23, 3: 30}, lines: {2: 21, 3: 31, 4: 22, 5: 22, 6: 22}},
        {orders: {1: 11, 2: 24, 3: 31}, lines: {2: 21, 4: 22, 5: 22, 6: 22}},
        {orders: {1: 11, 2: 24, 3: 31}, lines: {2: 21, 4: 22, 5: 22, 6: 22, 7: 70}},
        {orders: {1: 11, 2: 24, 3: 31, 8: 80}, lines: {2: 21, 4: 22, 5: 22, 6: 22, 7: 99}},
    ]
    assert lake.source.waits_for() == ""
    lake.close()


def test_reused_transaction_number_is_another_transaction() -> None:
    made = Connector(MemoryCluster(), numbers=2)
    lake = Lake(made.cluster)
    for n in range(2):
        made.commit([(A, 1, n), (B, 1, n)])
    lake.tick()
    for n in range(2, 6):
        before = lake.contents()
        made.commit([(A, 1, n), (B, 1, n)])
        first = lake.bound or Frontier()
        # Its events arrive before its BEGIN, and the number is already known.
        lake.tick({**made.cluster.ends(), f"{TX}-0": first[f"{TX}-0"]})
        assert lake.contents() == before
        lake.close()
        lake.open()
        lake.tick({**made.cluster.ends(), f"{TX}-0": first[f"{TX}-0"] + 1})
        assert lake.contents() == before
        lake.tick()
        assert lake.contents() == made.state
        made.resend(n)
        lake.close()
        lake.open()
        lake.tick()
        assert lake.contents() == made.state
        assert lake.source.waits_for() == ""
    lake.close()


@pytest.mark.parametrize("what", ["markers", "events"])
def test_transaction_number_reused_while_incomplete_raises_definite_error(what: str) -> None:
    made = Connector(MemoryCluster(), numbers=1)
    lake = Lake(made.cluster)
    made.commit([(A, 1, 0), (B, 1, 0)])
    held = {**made.cluster.ends(), f"{B}-1": 0}
    lake.tick(held)
    made.commit([(A, 1, 1)])
    ends = made.cluster.ends()
    come = f"{TX}-0" if what == "markers" else f"{A}-1"
    with pytest.raises(DefiniteError, match='the number "0", and the first of them waits') as error:
        lake.tick({**held, come: ends[come]})
    assert f'1 of 1 in topic "{B}"' in error.value.detail
    lake.close()


def test_event_beyond_count_of_applied_transaction_raises_definite_error(
    made: Connector, lake: Lake
) -> None:
    made.commit([(A, 1, 1)])
    lake.tick()
    made.sent[0].changes.append((A, 3, 3))
    made.resend(0)
    with pytest.raises(DefiniteError, match='event 2 of transaction "0", which was applied'):
        lake.tick()


def test_duplicate_events_of_applied_transaction_are_recognised() -> None:
    known = Transactions({A: None})
    known.add_events(A, runs(("x", 1, 3)))
    known.add_markers(marked(("END", "x"), counts='{"public.a": 2}'))
    assert known.ready() == ["x"]
    known.apply(["x"])
    assert known.add_events(A, runs(("x", 3, 3)))
    with pytest.raises(DefiniteError, match="applied with 3"):
        known.add_events(A, runs(("x", 4, 4)))


@pytest.mark.parametrize(
    ("applied", "same", "later"),
    [("mysql-1", "mysql-1", "mysql-2"), ("7:100", "7:100", "7:101"), ("7:100", "7:90", "8:90")],
    ids=["without positions", "with positions", "earlier position"],
)
def test_is_applied_recognises_id_of_applied_transaction(
    applied: str, same: str, later: str
) -> None:
    known = Transactions({A: None})
    known.add_markers(marked(("END", applied), counts="{}"))
    assert not known.is_applied(same)
    known.apply(known.ready())
    assert known.is_applied(same)
    assert not known.is_applied(later)


def test_topics_without_transaction_metadata_are_applied_in_arrival_order(made: Connector) -> None:
    lake = Lake(made.cluster, transactions=None)
    made.commit([(A, 1, 1), (B, 2, 2)])
    lake.tick({f"{A}-0": 0, f"{A}-1": 1, f"{B}-0": 0, f"{B}-1": 0})
    assert lake.contents() == {A: {1: 1}, B: {}}
    lake.tick()
    assert lake.contents() == {A: {1: 1}, B: {2: 2}}
    lake.close()


def test_recreated_topic_added_again_with_fewer_records_raises_definite_error(
    made: Connector,
) -> None:
    lake = Lake(made.cluster, transactions=None)
    made.commit([(A, 1, 1), (B, 1, 1), (B, 3, 3)])
    lake.tick()
    lake.close()
    both = lake.config
    lake.config = replace(both, topics={A: None})
    lake.open()
    lake.drop_removed()
    lake.tick()
    lake.close()
    lake.config = both
    made.cluster.make(B, 2)
    made.read(B, 5, 5)
    lake.open()
    with pytest.raises(DefiniteError, match="topic was recreated") as error:
        lake.tick()
    assert "was read to offset 2 before the topic was removed" in error.value.detail
    made.read(B, 7, 7)
    made.read(B, 9, 9)
    lake.tick()
    assert lake.contents() == {A: {1: 1}, B: {5: 5, 7: 7, 9: 9}}
    lake.close()


def test_topic_removed_and_added_again_resumes(made: Connector) -> None:
    made.cluster.make("c", 1)
    lake = Lake(made.cluster, transactions=None)
    both = lake.config
    for topics in ({A: None, B: None}, {A: None}, {A: None, "c": None}, {A: None, B: None}):
        made.read(B, len(made.snapshot), 1)
        lake.close()
        lake.config = replace(both, topics=topics)
        lake.open()
        lake.tick()
    assert lake.contents()[B] == {0: 1, 1: 1, 2: 1, 3: 1}
    lake.close()


def test_dropped_topic_added_again_is_read_from_start(made: Connector) -> None:
    """Dedup positions of the dropped collection must not apply to the new one."""
    lake = Lake(made.cluster, transactions=None)
    made.commit([(A, 1, 1), (B, 1, 1)])
    made.commit([(B, 3, 3)])
    made.commit([(B, 5, 5)])
    lake.tick()
    both = lake.config
    for topics in ({A: None}, both.topics):
        lake.close()
        lake.config = replace(both, topics=topics)
        lake.open()
        lake.drop_removed()
        lake.tick()
    assert lake.contents()[B] == {1: 1, 3: 3, 5: 5}
    lake.close()


def test_dead_letter_collection_advances_with_source_and_keeps_rows(made: Connector) -> None:
    lake = Lake(made.cluster, transactions=None)
    made.read(A, 1, 1)
    lake.tick()
    before = lake.clock.now_ms()
    plain = lake.config

    def again(on_bad_record: Any) -> None:
        lake.close()
        lake.config = replace(plain, on_bad_record=on_bad_record)
        lake.open()

    again("set_aside")
    made.cluster.send(A, 0, {"op": "t"})
    lake.tick()
    dead_letters = lake.client.collection("cdc_errors")
    assert dead_letters.since > before
    assert dead_letters.snapshot(dead_letters.upper - 1).arrow().num_rows == 1
    for on_bad_record in ("stop", "set_aside"):
        again(on_bad_record)
        made.read(A, 3, 3)
        lake.tick()
        dead_letters, seen = (lake.client.collection(name) for name in ("cdc_errors", f"cdc.{A}"))
        assert dead_letters.upper == seen.upper
        assert dead_letters.snapshot(dead_letters.upper - 1).arrow().num_rows == 1
    lake.close()


def test_topic_mapped_to_wrong_table_raises_definite_error_with_hint(
    made: Connector,
) -> None:
    made.commit([(A, 1, 1)])
    message: dict[str, str | None] = {A: "public.c", B: None}
    lake = Lake(made.cluster, topics=message)
    with pytest.raises(DefiniteError, match="which its END does not count") as error:
        lake.tick()
    assert f"topics: {{{A}:" in error.value.hint
    lake.close()


def test_topic_mapped_to_wrong_table_is_found_when_events_follow_their_end(made: Connector) -> None:
    made.commit([(A, 1, 1)])
    lake = Lake(made.cluster, topics={A: "public.c", B: None})
    lake.tick({f"{A}-0": 0, f"{A}-1": 0, f"{B}-0": 0, f"{B}-1": 0, f"{TX}-0": 2})
    with pytest.raises(DefiniteError, match="which its END does not count"):
        lake.tick()
    lake.close()


def test_transaction_metadata_topic_with_two_partitions_raises_definite_error(
    made: Connector, lake: Lake
) -> None:
    made.cluster.make(TX, 2)
    other = Lake(made.cluster)
    with pytest.raises(DefiniteError, match=r"metadata topic .* has 2 partitions"):
        other.tick()
    other.close()


def test_changed_topics_of_transactional_source_raise_definite_error(
    made: Connector, lake: Lake
) -> None:
    lake.tick()
    lake.close()
    lake.config = KafkaConfig(
        "nowhere:9092", "", lake.config.value, topics={A: None}, transactions=TX,
        envelope="debezium", key=("id",),
    )  # fmt: skip
    with pytest.raises(DefiniteError, match="has other topics than before"):
        lake.open()


def test_removing_transactions_from_config_is_rejected_and_loses_no_events(
    made: Connector, lake: Lake
) -> None:
    made.commit([(A, 1, 1)])
    made.sent.append(type(made.sent[0])([(A, 1, 2), (B, 5, 50)]))
    made.resend(1, up_to=3)  # All messages but the END.
    lake.tick()
    lake.close()
    whole = lake.config
    lake.config = replace(whole, transactions=None)
    with pytest.raises(DefiniteError, match=r"has transactions .*, and the file none") as error:
        lake.open()
    assert "Add transactions: shop.transaction." in error.value.hint
    destroyed: list[str] = []
    lake.source.drop_removed(lake._memory, destroyed.extend)
    assert destroyed == []
    lake.close()
    lake.config = whole
    lake.open()
    made.resend(1)
    lake.tick()
    assert lake.contents() == {A: {1: 2}, B: {5: 50}}


def test_adding_transactions_to_source_without_them_raises_definite_error(made: Connector) -> None:
    lake = Lake(made.cluster, transactions=None)
    made.commit([(A, 1, 1)])
    lake.tick()
    lake.close()
    lake.config = replace(lake.config, transactions=TX)
    with pytest.raises(DefiniteError, match="has no transactions, and the file names"):
        lake.open()
    lake.close()


def test_one_of_several_topics_recreated_during_read_raises_definite_error(
    made: Connector, lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake.tick()
    made.commit([(A, 1, 1), (B, 1, 1)])
    scan = lake.jobs.scan

    def scan_and_make_again(task: Any, watch: Any) -> Any:
        found = scan(task, watch)
        made.cluster.make(B, 2)
        return found

    monkeypatch.setattr(lake.jobs, "scan", scan_and_make_again)
    with pytest.raises(DefiniteError, match="topic was recreated"):
        lake.tick()
    assert lake.contents() == {A: {}, B: {}}


def test_malformed_transaction_metadata_record_raises_definite_error(
    made: Connector, lake: Lake
) -> None:
    made.cluster.send(TX, 0, {"what": "ever"})
    with pytest.raises(DefiniteError, match="offset 0 of partition 0") as error:
        lake.tick()
    assert "does not name the transaction" in str(error.value)


def test_transactions_larger_than_apply_limit_are_applied_in_passes(
    made: Connector, lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.sources.debezium.buffer.APPLY_BYTES", 2048)
    for n in range(20):
        made.commit([(A, id, n * 10 + id) for id in range(n, n + 5)])
    lake.tick()
    assert lake.contents() == made.state


def test_side_state_of_long_applied_transactions_is_dropped(
    made: Connector, lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.sources.debezium.buffer.KNOWN_TRANSACTIONS", 2)
    for n in range(7):
        made.commit([(A, n, n)])
        lake.tick()
    assert [name for name in lake.hidden() if "applied" in name] == [
        "cdc/pending/applied/2",
        "cdc/pending/applied/3",
    ]
    made.resend(6)
    lake.close()
    lake.open()
    lake.tick()
    assert lake.source.waits_for() == ""
    assert lake.contents() == made.state


@pytest.mark.parametrize("seed", range(10))
def test_resending_more_transactions_than_known_never_shows_earlier_state(
    seed: int, made: Connector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.sources.debezium.buffer.KNOWN_TRANSACTIONS", 1)
    rng = random.Random(seed)
    states = [{topic: dict(rows) for topic, rows in made.state.items()}]

    def commit(*changes: tuple[str, int, int]) -> None:
        made.commit(changes)
        states.append({topic: dict(rows) for topic, rows in made.state.items()})

    for n in range(7):
        commit(
            *((rng.choice(TOPICS), rng.randrange(4), 10 * n + at) for at in range(3)),
        )
    for number in range(7):
        made.resend(number)
    commit((A, 1, 77), (B, 2, 77))
    lake = Lake(made.cluster, places=rng.choice([1, 3]))
    reached = 0
    for _ in anywhere(made, lake, rng):
        reached = states.index(lake.contents(), reached)
    lake.close()


@pytest.mark.parametrize("kind", ["postgresql", "informix"])
def test_resent_transaction_beyond_known_ones_changes_nothing(
    kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.sources.debezium.buffer.KNOWN_TRANSACTIONS", 1)
    made = Connector(MemoryCluster(), kind)
    lake = Lake(made.cluster)
    for n in range(4):
        made.commit([(A, 1, n), (B, 1, n)])
        lake.tick()
    for number in range(4):
        made.resend(number)
        lake.close()
        lake.open()
        lake.tick()
        assert lake.contents() == made.state
        assert lake.source.waits_for() == ""
    lake.close()


def marked(*rows: tuple[str, str], counts: str = "{}") -> pa.Table:
    columns = [
        *zip(*((name, at, said, counts) for at, (said, name) in enumerate(rows)), strict=True)
    ]
    return pa.table([pa.array(each) for each in columns], schema=MARKERS)


def test_transaction_that_ends_during_an_open_one_waits_for_it() -> None:
    known = Transactions({"t": None})
    known.add_markers(marked(("BEGIN", "1"), ("BEGIN", "2"), ("END", "2")))
    assert known.ready() == []
    assert known.blocking_transaction() == "1"
    known.add_markers(marked(*[("BEGIN", "x")] * 3, ("END", "1")).slice(3))
    assert known.ready() == ["2", "1"]


def runs(*rows: tuple[str, int, int], at: int = -1) -> pa.Table:
    columns = [*zip(*rows, strict=True), [at] * len(rows)]
    return pa.table([pa.array(each) for each in columns], schema=RUNS)


def test_adjacent_event_runs_are_merged() -> None:
    found = merge_runs(runs(("x", 4, 5), ("y", 1, 9), ("x", 1, 2), ("x", 3, 3), ("y", 2, 3)))
    rows = sorted(tuple(row.values()) for row in found.to_pylist())
    assert rows == [("x", 1, 5, -1), ("y", 1, 9, -1)]
    apart = merge_runs(runs(("x", 1, 1), ("x", 3, 3)))
    assert apart.num_rows == 2


def test_match_topics_matches_topic_by_suffix_of_table_name() -> None:
    topics = {"p.db.s.a": None, "p.s.ba": None, "other": "s.c"}
    assert match_topics(["s.a", "db.s.a", "a", "s.c", "x.y"], topics) == {
        "db.s.a": "p.db.s.a",
        "s.c": "other",
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"topic": "a", "topics": {"b": None}}, "either topic or topics"),
        ({}, "either topic or topics"),
        ({"topic": "a", "transactions": "t"}, "need topics"),
        ({"topics": {"a": None}, "transactions": "t", "envelope": "none"}, "not none"),
        ({"topics": {"a": None}, "transactions": "a"}, "is also in topics"),
        ({"topics": {"a": None}, "keys": {"b": ("id",)}}, 'key for topic "b"'),
        (
            {"topics": {"a": None}, "transactions": "t", "start": "latest"},
            "at the beginning",
        ),
        ({"topics": {"a": None}, "start": {0: 1}}, "of one topic"),
    ],
)
def test_kafka_config_with_conflicting_topic_options_raises_usage_error(
    options: dict[str, Any], message: str
) -> None:
    given = {"topic": "", "envelope": "debezium", **options}
    with pytest.raises(UsageError, match=message):
        KafkaConfig("nowhere:9092", value=FormatSpec("json"), **given)


def test_kafka_section_with_several_topics_builds_config() -> None:
    section = {
        "brokers": "b:9092",
        "topics": {"a": "public.a", "b": None},
        "transactions": "t",
        "format": {"json": {"columns": {"id": "bigint", "n": "bigint"}}},
        "envelope": "debezium",
        "key": {"a": ["id"], "b": ["id", "n"]},
    }
    config = build_kafka_config(KafkaSection.model_validate(section))
    assert config.topics == {"a": "public.a", "b": None}
    assert config.for_topic("b").key == ("id", "n")
    assert (config.for_topic("t").envelope, config.for_topic("t").value) == (
        "none",
        FormatSpec("json"),
    )
    listed = build_kafka_config(KafkaSection.model_validate({**section, "topics": ["a", "b"]}))
    assert listed.topics == {"a": None, "b": None}
