"""Server identity, WAL position, and the check that the server's history contains ours."""

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.pgclient import Connection, connect
from penstock.servers.postgres import Database, PostgresServer
from penstock.sources.postgres.identity import (
    Behind,
    Fork,
    ForkedAfter,
    ForkedBefore,
    Identity,
    OtherServer,
    Probe,
    Same,
    compare_history,
    identify,
    parse_history,
    probe,
    strip_page_header,
)
from penstock.sources.postgres.lsn import Lsn
from penstock.sources.postgres.replication_stream import ReplicationStream
from penstock.sources.postgres.slots import create_slot
from tests.fix_postgres import standby_of
from tests.shared_postgres import QUICK

SEGMENT, PAGE = 16 << 20, 8192
positions = st.integers(0, 1 << 40)


@pytest.fixture(params=["database", "database18"])
def any_database(request: pytest.FixtureRequest) -> Database:
    return request.getfixturevalue(request.param)


@pytest.fixture
def sql(any_database: Database) -> Iterator[Connection]:
    with connect(any_database.url()) as connection:
        yield connection


def test_identify_and_probe_agree_on_server_identity(
    any_database: Database, sql: Connection
) -> None:
    with connect(any_database.url(), replication=True) as replication:
        named = identify(replication)
    probed = probe(sql)
    assert named.database == any_database.name
    assert named.history == ()
    assert (probed.system_id, probed.timeline) == (named.system_id, named.timeline)
    assert compare_history(named, identity_of(probed), named.xlogpos) == Same()
    assert not probed.standby


def test_probe_lsn_is_past_all_visible_commits(any_database: Database, sql: Connection) -> None:
    any_database.sql("CREATE TABLE t (i integer)")
    sql.execute("SET synchronous_commit = off")
    before = probe(sql)
    for _ in range(20):
        sql.execute("INSERT INTO public.t VALUES (1)")
        after = probe(sql)
        assert before.insert_lsn < after.insert_lsn
        assert after.flush_lsn <= after.insert_lsn
        assert before.now_ms <= after.now_ms
        before = after


def test_stream_of_idle_server_reaches_probed_lsn(any_database: Database, sql: Connection) -> None:
    """At the end of a page or a segment, the next record would start after a header."""
    any_database.sql("CREATE PUBLICATION p")
    with connect(any_database.url(), replication=True) as creation:
        create_slot(creation, "penstock_idle")
    seen = []
    for _ in range(3):
        sql.execute("SELECT pg_catalog.pg_switch_wal()")
        seen.append(probe(sql).insert_lsn.position)
    probed = seen[-1]
    assert 0 in [
        position % SEGMENT for position in seen
    ]  # Only a header would follow: the segment's end counts.
    reached = 0
    with (
        connect(any_database.url(), replication=True) as replication,
        ReplicationStream(
            replication, slot="penstock_idle", start=Lsn(0), publications=["p"]
        ) as stream,
    ):
        for _ in range(100):
            stream.confirm(Lsn(0), reply=True)
            if (chunk := stream.read(1)) is not None:
                reached = max(reached, chunk.wal_end)
            if reached >= probed:
                break
    assert reached >= probed


@given(position=positions)
def test_strip_page_header_subtracts_only_a_header(position: int) -> None:
    less = strip_page_header(Lsn(position), segment_bytes=SEGMENT, page_bytes=PAGE)
    taken = position - less.position
    assert taken in (0, 24, 40)
    if taken:
        assert less.position % (SEGMENT if taken == 40 else PAGE) == 0


@pytest.mark.parametrize(
    ("position", "expected"),
    [
        (SEGMENT * 3 + 40, SEGMENT * 3),
        (SEGMENT * 3 + PAGE + 24, SEGMENT * 3 + PAGE),
        (SEGMENT * 3 + PAGE + 40, SEGMENT * 3 + PAGE + 40),
        (SEGMENT * 3, SEGMENT * 3),
        (SEGMENT * 3 + PAGE + 32, SEGMENT * 3 + PAGE + 32),
    ],
)
def test_strip_page_header_subtracts_long_header_at_segment_start(
    position: int, expected: int
) -> None:
    less = strip_page_header(Lsn(position), segment_bytes=SEGMENT, page_bytes=PAGE)
    assert less == Lsn(expected)


def test_parse_history_reads_timelines_and_fork_positions() -> None:
    content = "1\t0/3000158\tno recovery target specified\n\n2\t0/50000A0\tbefore 2020-01-01\n# x\n"
    assert parse_history(content) == (
        Fork(1, Lsn.parse("0/3000158")),
        Fork(2, Lsn.parse("0/50000A0")),
    )


def server(timeline: int, position: int, *forks: tuple[int, int], system: int = 7) -> Identity:
    return Identity(
        system, timeline, Lsn(position), None, tuple(Fork(t, Lsn(at)) for t, at in forks)
    )


OURS = server(2, 0)


@pytest.mark.parametrize(
    ("current", "verdict"),
    [
        (server(2, 900), Same()),
        (server(2, 950), Same()),
        (server(2, 899), Behind(Lsn(899), Lsn(900))),
        (server(2, 950, system=8), OtherServer(7, 8)),
        (server(3, 950, (1, 100), (2, 900)), ForkedAfter(3, Lsn(900))),
        (server(5, 950, (1, 100), (2, 901), (3, 920)), ForkedAfter(5, Lsn(901))),
        (server(3, 950, (1, 100), (2, 899)), ForkedBefore(3, Lsn(899), Lsn(900))),
        # The server's timeline forked before ours began.
        (server(3, 950, (1, 80)), ForkedBefore(3, None, Lsn(900))),
        # The old primary returned.
        (server(1, 2000), ForkedBefore(1, None, Lsn(900))),
        # The history of the server is unknown.
        (server(3, 950), ForkedBefore(3, None, Lsn(900))),
        (server(3, 880, (1, 100), (2, 900)), Behind(Lsn(880), Lsn(900))),
    ],
)
def test_compare_history_returns_verdict_for_timeline_and_position(
    current: Identity, verdict: object
) -> None:
    assert compare_history(OURS, current, Lsn(900)) == verdict


@given(
    durable=positions,
    forks=st.lists(st.tuples(st.integers(1, 5), positions), max_size=4),
    timeline=st.integers(1, 6),
    position=positions,
)
def test_compare_history_accepts_only_server_that_has_all_durable_changes(
    durable: int, forks: list[tuple[int, int]], timeline: int, position: int
) -> None:
    current = server(timeline, position, *forks)
    verdict = compare_history(OURS, current, Lsn(durable))
    if isinstance(verdict, Same | ForkedAfter):
        assert position >= durable
        assert timeline == 2 or next(at for left, at in forks if left == 2) >= durable


def test_promoted_standby_is_accepted_only_up_to_its_fork_position() -> None:
    """Changes that it had replayed are safe; later ones are missing."""
    with PostgresServer(settings=QUICK) as primary:
        with connect(primary.url(), replication=True) as replication:
            ours = identify(replication)
        primary.sql("CREATE TABLE t (i integer)")
        with standby_of(primary) as standby:
            with connect(standby.url()) as sql:
                waiting = probe(sql)
                assert waiting.standby
                assert waiting.timeline == 0
                primary.sql("SELECT pg_switch_wal()")
                with connect(primary.url()) as connection:
                    shared = probe(connection).flush_lsn
                _await_replay(sql, shared)
            # Disconnect first: the standby never receives the following changes.
            standby.sql("ALTER SYSTEM SET primary_conninfo = ''")
            standby.restart()
            primary.sql("INSERT INTO t VALUES (1)")
            with connect(primary.url()) as connection:
                ahead = probe(connection).flush_lsn
            standby.sql("SELECT pg_promote()")
            standby.sql("INSERT INTO t SELECT generate_series(1, 10000)")
            with connect(standby.url(), replication=True) as replication:
                current = identify(replication)
            with connect(standby.url()) as sql:
                probed = probe(sql)
            assert current.system_id == ours.system_id
            assert (current.timeline, probed.timeline) == (2, 2)
            assert [fork.timeline for fork in current.history] == [1]
            left = current.history[0].at
            assert shared <= left < ahead < current.xlogpos
            assert compare_history(ours, current, shared) == ForkedAfter(2, left)
            assert compare_history(ours, current, ahead) == ForkedBefore(2, left, ahead)
            # A probe has no history, therefore it never accepts another timeline.
            assert compare_history(ours, identity_of(probed), shared) == ForkedBefore(
                2, None, shared
            )


def identity_of(probed: Probe) -> Identity:
    """Return the identity in a probe, without history."""
    return Identity(probed.system_id, probed.timeline, probed.flush_lsn)


def _await_replay(sql: Connection, up_to: Lsn) -> None:
    while probe(sql).insert_lsn < up_to:
        sql.execute("SELECT pg_catalog.pg_sleep(0.02)")
