"""Catalog queries for tables, types and publications, on real servers."""

from collections.abc import Iterator
from typing import Any

import pytest

from penstock.pgclient import Connection, connect
from penstock.servers.postgres import Database
from penstock.sources.postgres.catalog import (
    PgTable,
    describe,
    find_oids,
    published_tables,
    read_types,
)
from penstock.sources.postgres.fingerprint import read_fingerprint
from penstock.sources.postgres.names import TableName
from penstock.sources.postgres.publication import find_publication
from penstock.sources.postgres.slots import inspect_slot
from tests.sources.postgres.older import Older


@pytest.fixture(params=["database", "database18"])
def any_database(request: pytest.FixtureRequest) -> Database:
    return request.getfixturevalue(request.param)


@pytest.fixture
def sql(any_database: Database) -> Iterator[Connection]:
    with connect(any_database.url()) as connection:
        connection.execute("CREATE SCHEMA s")
        yield connection


def only(sql: Connection) -> PgTable:
    (table,) = published_tables(sql, "p")
    return table


def test_catalog_describes_columns_types_and_missing_values(sql: Connection) -> None:
    sql.execute(
        """
        CREATE TYPE s.mood AS ENUM ('sad', 'ok');
        CREATE DOMAIN s.price AS numeric(10,2);
        CREATE DOMAIN s.cost AS s.price NOT NULL;
        CREATE TYPE s.pair AS (a integer, b text);
        CREATE TABLE s.t (id bigint PRIMARY KEY, gone integer, moods s.mood[], cost s.cost,
          costs s.cost[], pairs s.pair[], grid numeric(5,1)[][], name name, spot point,
          twice bigint GENERATED ALWAYS AS (id * 2) STORED, code varchar(7) NOT NULL);
        ALTER TABLE s.t DROP COLUMN gone;
        INSERT INTO s.t (id, cost, code) VALUES (1, 1, 'x');
        ALTER TABLE s.t ADD box box DEFAULT '(1,1),(0,0)', ADD ints integer[] DEFAULT '{1,2}',
          ADD odd text DEFAULT 'a,"b\\{}', ADD nothing text,
          ADD at timestamptz DEFAULT '2020-01-01Z';
        CREATE PUBLICATION p FOR TABLE s.t;
        """
    )
    table = only(sql)
    assert (table.schema, table.name, table.kind, table.persistence) == ("s", "t", "r", "p")
    assert table.primary_key == table.identity == ("id",)
    assert table.replica_identity == "d"
    assert [column.number for column in table.columns] == [1, *range(3, 17)]
    assert table.column("id").type.name == "bigint"
    assert not table.column("id").nullable
    moods = table.column("moods").type
    assert moods.element is not None
    assert (moods.name, moods.category, moods.element.kind) == ("s.mood[]", "A", "e")
    cost = table.column("cost").type
    price = cost.base
    assert price is not None
    assert (cost.name, cost.kind, price.name) == ("s.cost", "d", "s.price")
    assert price.base is not None
    assert price.base.name == "numeric"
    assert price.typmod == ((10 << 16) | 2) + 4
    assert table.column("costs").type.element == cost
    pairs = table.column("pairs").type
    assert pairs.element is not None
    assert pairs.element.kind == "c"
    grid = table.column("grid")
    assert (grid.type.name, grid.typmod, grid.dimensions) == ("numeric[]", 5 * 65536 + 5, 2)
    # These have elements in the catalog and are not arrays.
    assert table.column("name").type.element is None
    assert table.column("spot").type.element is None
    assert table.column("twice").generated
    assert "twice" not in table.streamed
    assert len(table.streamed) == len(table.columns) - 1
    assert table.column("code").typmod == 7 + 4
    held = {column.name: column.missing for column in table.columns if column.has_missing}
    assert held == {
        "box": "(1,1),(0,0)",
        "ints": "{1,2}",
        "odd": 'a,"b\\{}',
        "at": "2020-01-01 00:00:00+00",
    }
    assert (table.pages, table.estimated_rows, table.bytes > 0) == (1, -1, True)
    sql.execute("ANALYZE s.t")
    assert only(sql).estimated_rows == 1


@pytest.mark.parametrize(
    ("statement", "kind", "identity"),
    [
        ("SELECT", "d", ("b", "a")),
        ("ALTER TABLE s.t REPLICA IDENTITY FULL", "f", ("a", "b", "c", "d")),
        ("ALTER TABLE s.t REPLICA IDENTITY NOTHING", "n", ()),
        (
            (
                "CREATE UNIQUE INDEX i ON s.t (c) INCLUDE (d);"
                "ALTER TABLE s.t REPLICA IDENTITY USING INDEX i"
            ),
            "i",
            ("c",),
        ),
        ("ALTER TABLE s.t DROP CONSTRAINT t_pkey", "d", ()),
        (
            "ALTER TABLE s.t DROP CONSTRAINT t_pkey;ALTER TABLE s.t ADD PRIMARY KEY (a) DEFERRABLE",
            "d",
            (),
        ),
    ],
)
def test_catalog_reports_replica_identity_columns(
    sql: Connection, statement: str, kind: str, identity: tuple[str, ...]
) -> None:
    sql.execute(
        "CREATE TABLE s.t (a integer, b integer, c integer NOT NULL, d integer,"
        " PRIMARY KEY (b, a) INCLUDE (d)); CREATE PUBLICATION p FOR TABLE s.t"
    )
    sql.execute(statement)
    table = only(sql)
    assert (table.replica_identity, table.identity) == (kind, identity)


@pytest.mark.postgres(15)
def test_catalog_reports_column_list_and_row_filter(sql: Connection) -> None:
    sql.execute(
        'CREATE TABLE s.t (a integer PRIMARY KEY, b text, c integer, "D d" integer);'
        'CREATE PUBLICATION p FOR TABLE s.t (c, a, "D d") WHERE (a > 1 AND "D d" < 7)'
    )
    table = only(sql)
    assert table.published_columns == ("a", "c", "D d")
    assert table.streamed == ("a", "c", "D d")
    assert table.filter_columns == ("a", "D d")
    assert table.row_filter is not None
    assert sql.query(f"SELECT count(*) FROM s.t WHERE {table.row_filter}") == [("0",)]


@pytest.mark.postgres(13)
def test_catalog_reports_root_and_leaves_with_other_column_order(sql: Connection) -> None:
    sql.execute(
        """
        CREATE TABLE s.r (id integer PRIMARY KEY, v text) PARTITION BY RANGE (id);
        CREATE TABLE s.r1 (v text, junk integer, id integer NOT NULL);
        ALTER TABLE s.r1 DROP COLUMN junk;
        ALTER TABLE s.r ATTACH PARTITION s.r1 FOR VALUES FROM (0) TO (10);
        CREATE TABLE s.r2 PARTITION OF s.r FOR VALUES FROM (10) TO (99) PARTITION BY RANGE (id);
        CREATE TABLE s.r21 PARTITION OF s.r2 FOR VALUES FROM (10) TO (50);
        INSERT INTO s.r SELECT i, 'v' FROM generate_series(0, 49) i;
        ALTER TABLE s.r ADD w integer DEFAULT 5;
        ALTER TABLE s.r21 REPLICA IDENTITY FULL;
        CREATE PUBLICATION p FOR TABLE s.r WITH (publish_via_partition_root = true);
        """
    )
    root = only(sql)
    assert (root.name, root.kind) == ("r", "p")
    assert [(leaf.name, leaf.replica_identity, leaf.identity) for leaf in root.leaves] == [
        ("r1", "d", ("id",)),
        ("r21", "f", ()),
    ]
    assert all(leaf.selectable for leaf in root.leaves)
    assert (root.pages, root.bytes) == (2, sum(leaf.bytes for leaf in root.leaves))
    assert (root.column("w").has_missing, root.column("w").missing) == (True, "5")
    sql.execute("ALTER PUBLICATION p SET (publish_via_partition_root = false)")
    leaves = published_tables(sql, "p")
    assert [(leaf.name, leaf.ancestors) for leaf in leaves] == [
        ("r1", (TableName("s", "r"),)),
        ("r21", (TableName("s", "r2"), TableName("s", "r"))),
    ]
    assert [column.name for column in leaves[0].columns] == ["v", "id", "w"]
    assert not any(leaf.leaves for leaf in leaves)


def test_catalog_reports_inheritance_children_as_separate_tables(sql: Connection) -> None:
    sql.execute(
        "CREATE TABLE s.parent (id integer PRIMARY KEY);"
        "CREATE TABLE s.child () INHERITS (s.parent);"
        "CREATE PUBLICATION p FOR TABLE ONLY s.parent; CREATE PUBLICATION q FOR TABLE s.parent"
    )
    parent = only(sql)
    assert (parent.name, parent.leaves) == ("parent", ())
    assert [table.name for table in published_tables(sql, "q")] == ["child", "parent"]


def test_describe_includes_requested_tables_that_are_not_published(sql: Connection) -> None:
    sql.execute("CREATE TABLE s.t (); CREATE VIEW s.v AS SELECT 1 AS i; CREATE PUBLICATION p")
    names = [TableName("s", "t"), TableName("s", "v"), TableName("s", "none")]
    oids = find_oids(sql, names)
    assert set(oids) == set(names[:2])
    assert [
        (table.name, table.kind, table.published) for table in describe(sql, "p", oids.values())
    ] == [("t", "r", False), ("v", "v", False)]
    assert published_tables(sql, "none") == ()
    assert find_publication(sql, "none") is None


def test_read_types_of_no_oids_returns_empty_mapping(sql: Connection) -> None:
    assert read_types(sql, ()) == {}


def test_generated_columns_are_streamed_if_publication_includes_them(database18: Database) -> None:
    with connect(database18.url()) as sql:
        sql.execute(
            "CREATE TABLE public.t (id integer PRIMARY KEY,"
            " stored integer GENERATED ALWAYS AS (id * 2) STORED,"
            " virtual integer GENERATED ALWAYS AS (id * 3) VIRTUAL);"
            "CREATE PUBLICATION p FOR TABLE public.t;"
            "CREATE PUBLICATION too FOR TABLE public.t WITH (publish_generated_columns = stored);"
            "CREATE PUBLICATION listed FOR TABLE public.t (id, stored)"
        )
        sent = {name: published_tables(sql, name)[0].streamed for name in ("p", "too", "listed")}
    assert sent == {"p": ("id",), "too": ("id", "stored"), "listed": ("id", "stored")}


MEMBERS = {
    "FOR TABLE s.t, s.r1, s.r21": 12,
    "FOR ALL TABLES": 12,
    "": 12,
    "FOR TABLE s.t, s.r": 13,
    "FOR TABLE s.t, s.r1, s.r2": 13,
    "FOR TABLE s.r, s.r1, s.r21": 13,
    "FOR TABLES IN SCHEMA s": 15,
    "FOR TABLES IN SCHEMA s2": 15,
    "FOR TABLES IN SCHEMA s2, TABLE s.r": 15,
}
"""Members of a publication, and the first server version that supports them."""


@pytest.mark.parametrize(
    "options",
    [
        pytest.param("WITH (publish_via_partition_root = true)", marks=pytest.mark.postgres(13)),
        "",
    ],
    ids=["root", "leaves"],
)
def test_published_tables_agree_with_pg_publication_tables(sql: Connection, options: str) -> None:
    """pg_publication_tables waits for locks; our query must not, and must agree with it."""
    sql.execute(
        """
        CREATE SCHEMA s2;
        CREATE TABLE s.t (id integer); CREATE TABLE s.child () INHERITS (s.t);
        CREATE UNLOGGED TABLE s.unlogged (); CREATE VIEW s.v AS SELECT 1 AS i;
        CREATE TABLE s.r (id integer PRIMARY KEY) PARTITION BY RANGE (id);
        CREATE TABLE s.r1 PARTITION OF s.r FOR VALUES FROM (0) TO (10);
        CREATE TABLE s.r2 PARTITION OF s.r FOR VALUES FROM (10) TO (20) PARTITION BY RANGE (id);
        CREATE TABLE s.r21 PARTITION OF s.r2 FOR VALUES FROM (10) TO (15);
        CREATE TABLE s2.r22 PARTITION OF s.r2 FOR VALUES FROM (15) TO (20);
        CREATE TABLE s2.empty (id integer) PARTITION BY RANGE (id);
        """
    )
    for number, (members, since) in enumerate(MEMBERS.items()):
        if sql.server_version < since * 10_000:
            continue
        sql.execute(f"CREATE PUBLICATION p{number} {members} {options}")
        ours = [(table.schema, table.name) for table in published_tables(sql, f"p{number}")]
        # Before version 15 the view lists a partition twice if it is named twice.
        theirs = sql.query(
            "SELECT DISTINCT schemaname, tablename FROM pg_catalog.pg_publication_tables"
            f" WHERE pubname = 'p{number}' ORDER BY 1, 2"
        )
        assert ours == theirs, members


@pytest.mark.parametrize("version", [120000, 130000, 140000, 150000, 160000, 170000])
def test_catalog_queries_for_older_servers_run_on_newer_server(
    database18: Database, version: int
) -> None:
    """A newer server still has every column that the queries for an older one use."""
    with connect(database18.url()) as connection:
        connection.execute(
            "CREATE TABLE public.t (id integer PRIMARY KEY, v text); CREATE PUBLICATION p"
            " FOR TABLE public.t"
        )
        connection.execute(
            "SELECT pg_catalog.pg_create_logical_replication_slot('old', 'pgoutput')"
        )
        older: Any = Older(connection, version)
        (table,) = published_tables(older, "p")
        assert (table.name, table.streamed) == ("t", ("id", "v"))
        assert table == published_tables(connection, "p")[0]
        assert find_publication(older, "p") == find_publication(connection, "p")
        assert read_fingerprint(older, "p", ()) == read_fingerprint(connection, "p", ())
        slot = inspect_slot(older, "old")
        assert slot is not None
        assert not slot.lost
        assert (slot.wal_status is None) == (version < 130000)
