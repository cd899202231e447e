"""Fingerprints and their differences, on real servers."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.pgclient import Connection, connect
from penstock.servers.postgres import Database
from penstock.sources.postgres.changes import (
    AttachedLeaf,
    Change,
    ColumnsChanged,
    IdentityChanged,
    KeyChanged,
    LeavesChanged,
    Renamed,
    Rewritten,
    TypeChanged,
)
from penstock.sources.postgres.drift import compare, is_explained
from penstock.sources.postgres.fingerprint import Fingerprint, read_fingerprint
from tests.datadriven import Directive
from tests.fix_scripts import Script, stories

TABLES = """
    CREATE SCHEMA s;
    CREATE TYPE s.mood AS ENUM ('sad', 'ok');
    CREATE TYPE s.pair AS (a integer);
    CREATE DOMAIN s.moods AS s.mood[];
    CREATE TABLE s.t (id integer PRIMARY KEY, amount integer, note text, other integer,
        code varchar(2), price numeric(5,2), mood s.mood, moods s.moods, pair s.pair);
    INSERT INTO s.t SELECT i, i, 'n', i, i FROM generate_series(1, 9) i;
    CREATE TABLE s.nokey (id integer);
    ALTER TABLE s.nokey REPLICA IDENTITY FULL;
    CREATE TABLE s.more (id integer);
    CREATE TABLE s.r (id integer PRIMARY KEY, v text) PARTITION BY RANGE (id);
    CREATE TABLE s.r1 PARTITION OF s.r FOR VALUES FROM (0) TO (100);
    CREATE TABLE s.r2 PARTITION OF s.r FOR VALUES FROM (100) TO (200);
    CREATE TABLE s.r3 PARTITION OF s.r FOR VALUES FROM (300) TO (400) PARTITION BY RANGE (id);
    CREATE TABLE s.r31 PARTITION OF s.r3 FOR VALUES FROM (300) TO (350);
    INSERT INTO s.r VALUES (1, 'v'), (101, 'v'), (301, 'v');
"""
AWAY = "DROP PUBLICATION IF EXISTS p; DROP SCHEMA IF EXISTS s CASCADE; DROP TABLE IF EXISTS t"


@pytest.fixture(params=["database", "database18"])
def any_database(request: pytest.FixtureRequest) -> Database:
    return request.getfixturevalue(request.param)


@pytest.fixture
def sql(any_database: Database) -> Iterator[Connection]:
    with connect(any_database.url()) as connection:
        yield connection


def make_tables(sql: Connection) -> None:
    """Create the tables and their publication; without the root if the server cannot publish it."""
    sql.execute(TABLES)
    members = "s.t, s.r, s.nokey WITH (publish_via_partition_root = true)"
    if sql.server_version < 130000:
        members = "s.t, s.nokey"
    sql.execute(f"CREATE PUBLICATION p FOR TABLE {members}")


class Upstream:
    """Recreate the tables for each directive and print the changes."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def obey(self, directive: Directive) -> str | None:
        if self.connection.server_version < int(directive.args.get("since", 0)) * 10_000:
            return None
        self.connection.execute(AWAY)
        make_tables(self.connection)
        before = self.read(())
        for statement in directive.input:
            self.connection.execute(statement)
        # With `last` given, the digest must show that there are changes to read.
        after = read_fingerprint(self.connection, "p", before.tables, last=before)
        changes = compare(before, after)
        return "\n".join(map(printed, changes)) or "nothing"

    def read(self, tables) -> Fingerprint:
        return read_fingerprint(self.connection, "p", tables)


def printed(change: Change) -> str:
    """Render a change without the numbers that differ between runs."""
    kind = type(change).__name__
    match change:
        case ColumnsChanged():
            return f"{kind} {change.name}" + "".join(
                [f" +{c.name} {c.default} known={c.known}" for c in change.appended]
                + [f" {c.before}>{c.after}" for c in change.renamed]
                + [f" -{name}" for name in change.dropped]
                + [f" {c.name}:{c.before}>{c.after}" for c in change.retyped]
                + [f" null:{name}" for name in change.loosened]
                + [f" notnull:{name}" for name in change.tightened]
            )
        case LeavesChanged():
            return f"{kind} {change.name}" + "".join(
                [f" +{leaf.name} born={leaf.born}" for leaf in change.attached]
                + [f" -{name}" for name in change.detached]
                + [f" rewritten:{leaf.name}" for leaf in change.rewritten]
            )
        case Rewritten():
            return f"{kind} {change.name} harmless={change.harmless}"
        case IdentityChanged():
            leaf = f" {change.leaf}" if change.leaf else ""
            return f"{kind} {change.name}{leaf} {change.before} > {change.after}"
        case KeyChanged():
            return f"{kind} {change.name} {change.before} > {change.after}"
        case Renamed():
            return f"{kind} {change.before} > {change.after}"
        case TypeChanged():
            return f"{kind} {change.name} {change.type} {change.columns}"
        case _:
            name = getattr(change, "name", "")
            told = [f"{getattr(change, part, '')}" for part in ("before", "after")]
            return re.sub(r" \d+ > \d+", "", f"{kind} {name} {' > '.join(told)}").rstrip(" >")


@pytest.mark.parametrize("path", stories("postgres"), ids=lambda path: path.stem)
def test_fingerprint_detects_each_silent_change(
    path: Path, sql: Connection, script: Script
) -> None:
    script(path, Upstream(sql).obey)


def rewritten(changes: list[Change]) -> Rewritten:
    (change,) = [change for change in changes if isinstance(change, Rewritten)]
    return change


def test_rewrite_by_truncate_is_explained_by_its_transaction(sql: Connection) -> None:
    """With FOR ALL TABLES, the table could have been unlogged in between."""
    upstream = Upstream(sql)
    make_tables(sql)
    sql.execute("DROP PUBLICATION p; CREATE PUBLICATION p FOR ALL TABLES")
    before = upstream.read(())
    sql.execute("BEGIN; TRUNCATE s.t")
    xid = int(sql.query("SELECT pg_catalog.txid_current()")[0][0] or 0) % 2**32
    sql.execute("COMMIT")
    after = upstream.read(before.tables)
    change = rewritten(compare(before, after))
    assert change.name.name == "t"
    assert not change.harmless
    assert is_explained(change, {change.table: {xid}})
    assert not is_explained(change, {change.table: {xid + 1}})
    assert not is_explained(change, {change.table + 1: {xid}})
    # The stream does not report any later change.
    sql.execute("ALTER TABLE s.t ALTER amount TYPE integer USING amount * 100")
    assert not is_explained(
        rewritten(compare(before, upstream.read(before.tables))), {change.table: {xid}}
    )


@pytest.mark.parametrize(
    "members", ["ALL TABLES", pytest.param("TABLES IN SCHEMA s", marks=pytest.mark.postgres(15))]
)
def test_rewrite_of_table_unlogged_for_a_while_is_not_harmless(
    sql: Connection, members: str
) -> None:
    make_tables(sql)
    sql.execute(f"DROP PUBLICATION p; CREATE PUBLICATION p FOR {members}")
    before = read_fingerprint(sql, "p", ())
    sql.execute(
        "ALTER TABLE s.t SET UNLOGGED; INSERT INTO s.t VALUES (100); ALTER TABLE s.t SET LOGGED"
    )
    assert not rewritten(compare(before, read_fingerprint(sql, "p", before.tables))).harmless


@pytest.mark.postgres(13)
def test_truncate_of_root_explains_rewritten_leaves(sql: Connection) -> None:
    make_tables(sql)
    before = read_fingerprint(sql, "p", ())
    sql.execute("TRUNCATE s.r")
    (change,) = compare(before, read_fingerprint(sql, "p", before.tables))
    assert isinstance(change, LeavesChanged)
    assert len({leaf.xid for leaf in change.rewritten}) == 1
    for leaf in change.rewritten:
        assert is_explained(leaf, {change.table: {leaf.xid}}, root=change.table)
        assert not is_explained(leaf, {}, root=change.table)


@pytest.mark.postgres(15)
def test_table_moved_out_of_published_schema_and_back_is_republished(sql: Connection) -> None:
    make_tables(sql)
    sql.execute("DROP PUBLICATION p; CREATE PUBLICATION p FOR TABLES IN SCHEMA s")
    before = read_fingerprint(sql, "p", ())
    sql.execute("GRANT SELECT ON s.t TO public; ALTER TABLE s.t ADD CHECK (id > 0)")
    assert compare(before, read_fingerprint(sql, "p", before.tables)) == []
    sql.execute(
        "ALTER TABLE s.t SET SCHEMA public; INSERT INTO public.t VALUES (100);"
        "ALTER TABLE public.t SET SCHEMA s"
    )
    changes = compare(before, read_fingerprint(sql, "p", before.tables))
    assert [printed(change) for change in changes] == ["Republished s.t"]


@pytest.mark.postgres(13)
def test_new_partitions_with_defaults_and_keys_are_reported_as_attached(sql: Connection) -> None:
    sql.execute(
        "CREATE SCHEMA s; CREATE TABLE s.r (id bigint GENERATED BY DEFAULT AS IDENTITY,"
        " at timestamptz NOT NULL DEFAULT now(), v text DEFAULT 'x' CHECK (v <> ''), w text,"
        " PRIMARY KEY (id, at)) PARTITION BY RANGE (at);"
        "CREATE PUBLICATION p FOR TABLE s.r WITH (publish_via_partition_root = true)"
    )
    before = read_fingerprint(sql, "p", ())
    sql.execute(
        "CREATE TABLE s.old PARTITION OF s.r DEFAULT;"
        "CREATE TABLE s.new PARTITION OF s.r FOR VALUES FROM ('2020-01-01') TO ('2021-01-01');"
        "INSERT INTO s.r (at) VALUES ('2020-05-05')"
    )
    (change,) = compare(before, read_fingerprint(sql, "p", before.tables))
    assert isinstance(change, LeavesChanged)
    assert [type(leaf) for leaf in change.attached] == [AttachedLeaf, AttachedLeaf]


def test_fingerprint_does_not_wait_for_locks(sql: Connection, any_database: Database) -> None:
    make_tables(sql)
    before = read_fingerprint(sql, "p", ())
    with connect(any_database.url()) as other:
        other.execute("BEGIN; ALTER TABLE s.t ADD f3 integer; ALTER TABLE s.r ADD w integer")
        sql.execute("SET lock_timeout = '10s'")
        assert read_fingerprint(sql, "p", before.tables) == before


def test_fingerprint_without_changes_returns_last_fingerprint(sql: Connection) -> None:
    make_tables(sql)
    first = read_fingerprint(sql, "p", ())
    sql.execute("INSERT INTO s.t VALUES (100); CREATE TABLE s.beside (i integer)")
    assert read_fingerprint(sql, "p", (), last=first) is first


def test_fingerprint_detects_published_generated_columns_and_changed_expression(
    database18: Database,
) -> None:
    with connect(database18.url()) as sql:
        sql.execute(
            "CREATE TABLE public.t (id integer PRIMARY KEY,"
            " twice integer GENERATED ALWAYS AS (id * 2) STORED);"
            "CREATE PUBLICATION p FOR TABLE public.t"
        )
        before = read_fingerprint(sql, "p", ())
        sql.execute("ALTER PUBLICATION p SET (publish_generated_columns = stored)")
        sent = read_fingerprint(sql, "p", before.tables)
        assert [type(change).__name__ for change in compare(before, sent)] == [
            "PublicationAltered",
            "ColumnListChanged",
        ]
        # The column's catalog row is unchanged, but its values are not.
        sql.execute("ALTER TABLE public.t ALTER twice SET EXPRESSION AS (id * 3)")
        assert not rewritten(compare(sent, read_fingerprint(sql, "p", sent.tables))).harmless


def test_columns_changed_ignoring_excluded_columns_leaves_other_changes(sql: Connection) -> None:
    make_tables(sql)
    before = read_fingerprint(sql, "p", ())
    sql.execute("ALTER TABLE s.t DROP COLUMN note, ALTER code TYPE varchar(9)")
    (change,) = compare(before, read_fingerprint(sql, "p", before.tables))
    assert isinstance(change, ColumnsChanged)
    rest = change.ignoring({"note"})
    assert rest is not None
    assert (rest.dropped, len(rest.retyped)) == ((), 1)
    assert change.ignoring({"note", "code"}) is None


def test_compare_of_equal_fingerprints_reports_no_change(sql: Connection) -> None:
    make_tables(sql)
    mark = read_fingerprint(sql, "p", ())
    assert compare(mark, mark) == []
    assert compare(mark, replace(mark, digest="another")) == []
