"""Checks before a source starts: each problem has a hint with statements that fix it.

The tests run the statements of the hints, and check that the problem is fixed.
"""

import re
from collections.abc import Iterator
from typing import Any

import pytest

from penstock.errors import Problem
from penstock.pgclient import connect
from penstock.servers.postgres import Database, PostgresServer
from penstock.sources.postgres.config import PostgresConfig, TableSpec
from penstock.sources.postgres.errors import NotReady
from penstock.sources.postgres.names import TableName
from penstock.sources.postgres.preflight import (
    check,
    create_publication,
    publication_setup,
    publication_statement,
    require,
)
from penstock.sources.postgres.publication import Creator, read_creator
from penstock.sources.postgres.slots import create_slot, slot_name
from tests.sources.postgres.older import Older

READER = "reader"


@pytest.fixture(params=["database", "database18"])
def any_database(request: pytest.FixtureRequest) -> Iterator[Database]:
    """Yield a database with a role that may only read and replicate."""
    database: Database = request.getfixturevalue(request.param)
    database.sql(
        f"DROP ROLE IF EXISTS {READER}; CREATE ROLE {READER} LOGIN REPLICATION;"
        "CREATE TABLE t (id integer PRIMARY KEY, note text, photo bytea);"
        "CREATE PUBLICATION p FOR TABLE t;"
        f"GRANT SELECT ON t TO {READER}"
    )
    yield database
    database.sql(f"DROP OWNED BY {READER}; DROP ROLE {READER}")


def problems_of(
    database: Database, *tables: object, user: str = READER, publication: str = "p", **more: object
) -> list[Problem]:
    config = configured(database, *tables, user=user, publication=publication)
    with connect(config.parameters) as connection:
        return check(connection, config, **more)  # type: ignore[arg-type]


def configured(
    database: Database, *tables: object, user: str = READER, publication: str = "p"
) -> PostgresConfig:
    said = {"url": database.url(user=user), "publication": publication}
    return PostgresConfig.parse(said | ({"tables": list(tables)} if tables else {}))


def run_hint(database: Database, problem: Problem) -> None:
    """Run the statements of a hint."""
    statements = re.findall(r"(?:ALTER|GRANT|CREATE|REVOKE) [^;]+;", problem.hint)
    assert statements, problem
    for statement in statements:
        database.sql(statement)


def test_checks_pass_for_role_that_may_read_and_replicate(any_database: Database) -> None:
    assert problems_of(any_database) == []
    assert problems_of(any_database, "public.t") == []
    config = configured(any_database)
    with connect(config.parameters, replication=True) as replication:
        created = create_slot(replication, slot_name("shop", "abcd"), temporary=True)
        with connect(config.parameters) as sql:
            sql.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
            sql.execute(f"SET TRANSACTION SNAPSHOT '{created.snapshot}'")
            assert sql.query("SELECT id FROM ONLY public.t") == []


CASES: dict[str, tuple[str, list[Any], str]] = {
    "no REPLICATION": (
        f"ALTER ROLE {READER} NOREPLICATION",
        ["public.t"],
        'role "reader" may not replicate',
    ),
    "no publication": (
        "DROP PUBLICATION p",
        ["public.t"],
        'publication "p" does not exist',
    ),
    "not in the publication": (
        f"CREATE TABLE u (id integer PRIMARY KEY); GRANT SELECT ON u TO {READER}",
        ["public.t", "public.u"],
        'table public.u is not in publication "p"',
    ),
    "some operations": (
        "ALTER PUBLICATION p SET (publish = 'insert, delete')",
        ["public.t"],
        'publication "p" does not send every update or truncate',
    ),
    "no SELECT": (
        f"REVOKE SELECT ON t FROM {READER}",
        ["public.t"],
        'role "reader" may not read table public.t',
    ),
    "SELECT of some columns": (
        f"REVOKE SELECT ON t FROM {READER}; GRANT SELECT (id) ON t TO {READER}",
        [{"name": "t", "exclude": ["photo"]}],
        'role "reader" may not read table public.t',
    ),
    "no USAGE": (
        (
            "CREATE SCHEMA odd; CREATE TABLE odd.u (id integer PRIMARY KEY);"
            f"GRANT SELECT ON odd.u TO {READER}; ALTER PUBLICATION p ADD TABLE odd.u"
        ),
        ["odd.u"],
        'role "reader" may not use schema "odd"',
    ),
    "row level security": (
        "ALTER TABLE t ENABLE ROW LEVEL SECURITY; CREATE POLICY few ON t USING (id > 1)",
        ["public.t"],
        'row level security hides rows of table public.t from role "reader"',
    ),
    "identity nothing": (
        "ALTER TABLE t REPLICA IDENTITY NOTHING",
        ["public.t"],
        "table public.t has no replica identity, so updates and deletes do not identify a row",
    ),
    "no key": (
        "ALTER TABLE t DROP CONSTRAINT t_pkey",
        ["public.t"],
        "table public.t has no replica identity, so updates and deletes do not identify a row",
    ),
    "a deferrable key": (
        "ALTER TABLE t DROP CONSTRAINT t_pkey; ALTER TABLE t ADD PRIMARY KEY (id) DEFERRABLE",
        ["public.t"],
        "table public.t has no replica identity, so updates and deletes do not identify a row",
    ),
    "a dropped identity index": (
        (
            "CREATE UNIQUE INDEX i ON t (id); ALTER TABLE t REPLICA IDENTITY USING INDEX i;"
            "DROP INDEX i"
        ),
        ["public.t"],
        "table public.t has no replica identity, so updates and deletes do not identify a row",
    ),
    "excluded identity": (
        "",
        [{"name": "t", "exclude": ["id"]}],
        "column id of table public.t is excluded and is part of its replica identity",
    ),
    "a filter outside the identity": (
        "DROP PUBLICATION p; CREATE PUBLICATION p FOR TABLE t WHERE (note <> 'x' AND id > 0)",
        ["public.t"],
        (
            'the row filter of table public.t in publication "p" uses columns note, which are '
            "not in its replica identity"
        ),
    ),
    "a list without the identity": (
        "DROP PUBLICATION p; CREATE PUBLICATION p FOR TABLE t (note)",
        ["public.t"],
        (
            'the column list of table public.t in publication "p" leaves out id of its replica '
            "identity"
        ),
    ),
    "a list with a whole identity": (
        (
            "ALTER TABLE t REPLICA IDENTITY FULL; DROP PUBLICATION p;"
            "CREATE PUBLICATION p FOR TABLE t (id, note)"
        ),
        ["public.t"],
        (
            'the column list of table public.t in publication "p" leaves out photo of its replica '
            "identity"
        ),
    ),
    "unlogged": (
        f"CREATE UNLOGGED TABLE u (id integer PRIMARY KEY); GRANT SELECT ON u TO {READER}",
        ["public.u"],
        "public.u is an unlogged table, whose changes the server does not send",
    ),
    "partitions under their own names": (
        (
            "CREATE TABLE r (id integer PRIMARY KEY) PARTITION BY RANGE (id);"
            "CREATE TABLE r1 PARTITION OF r FOR VALUES FROM (0) TO (10);"
            f"GRANT SELECT ON r TO {READER}; ALTER PUBLICATION p ADD TABLE r"
        ),
        ["public.r"],
        'publication "p" sends the partitions of public.r under their own names',
    ),
    "a leaf with another identity": (
        (
            "CREATE TABLE r (id integer PRIMARY KEY) PARTITION BY RANGE (id);"
            "CREATE TABLE r1 PARTITION OF r FOR VALUES FROM (0) TO (10);"
            "ALTER TABLE r REPLICA IDENTITY FULL;"
            f"GRANT SELECT ON r TO {READER}; ALTER PUBLICATION p ADD TABLE r;"
            "ALTER PUBLICATION p SET (publish_via_partition_root = true)"
        ),
        ["public.r"],
        "partition public.r1 and table public.r have different replica identities",
    ),
    "a whole leaf": (
        (
            "CREATE TABLE r (id integer PRIMARY KEY) PARTITION BY RANGE (id);"
            "CREATE TABLE r1 PARTITION OF r FOR VALUES FROM (0) TO (10);"
            "ALTER TABLE r1 REPLICA IDENTITY FULL;"
            f"GRANT SELECT ON r TO {READER}; ALTER PUBLICATION p ADD TABLE r;"
            "ALTER PUBLICATION p SET (publish_via_partition_root = true)"
        ),
        ["public.r"],
        "partition public.r1 and table public.r have different replica identities",
    ),
}
UNCURED_BY_ONE = {"excluded identity", "unlogged"}
"""Cases whose hint gives one of two ways, or only the first step."""


SINCE = {
    "a filter outside the identity": 15,
    "a list without the identity": 15,
    "a list with a whole identity": 15,
    "partitions under their own names": 13,
    "a leaf with another identity": 13,
    "a whole leaf": 13,
}
"""Oldest server version of a case."""


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.postgres(SINCE.get(case, 12))) for case in CASES],
)
def test_check_hint_fixes_reported_problem(case: str, any_database: Database) -> None:
    prepare, tables, message = CASES[case]
    if prepare:
        any_database.sql(prepare)
    problems = problems_of(any_database, *tables)
    assert [problem.message for problem in problems] == [message]
    for _ in range(3):
        if not problems:
            break
        assert case in UNCURED_BY_ONE or problems[0].message == message
        run_hint(any_database, problems[0])
        problems = problems_of(any_database, *tables)
    assert problems == []


UNFIT = {
    "CREATE VIEW v AS SELECT 1 AS i": ("public.v", "is a view"),
    "CREATE MATERIALIZED VIEW v AS SELECT 1 AS i": ("public.v", "is a materialized view"),
    "CREATE SEQUENCE v": ("public.v", "is a sequence"),
    "CREATE FOREIGN DATA WRAPPER w; CREATE SERVER s FOREIGN DATA WRAPPER w;"
    "CREATE FOREIGN TABLE v (i integer) SERVER s": ("public.v", "is a foreign table"),
    "SELECT": ("pg_catalog.pg_class", "is a system table"),
}


@pytest.mark.parametrize("statement", UNFIT)
def test_checks_reject_relations_that_are_not_tables(
    statement: str, any_database: Database
) -> None:
    any_database.sql(statement)
    name, what = UNFIT[statement]
    problems = problems_of(any_database, name)
    assert len(problems) == 1
    assert f"{name} {what}, whose changes the server does not send" in problems[0].message
    assert problems[0].hint


def test_checks_suggest_similar_table_names(any_database: Database) -> None:
    any_database.sql('CREATE SCHEMA shop; CREATE TABLE shop.orders (); CREATE TABLE "Customers" ()')
    problems = problems_of(any_database, "public.orders", "public.customers", "public.zzz")
    assert [problem.message for problem in problems] == [
        "table public.orders does not exist",
        "table public.customers does not exist",
        "table public.zzz does not exist",
    ]
    assert "Did you mean shop.orders?" in problems[0].hint
    assert 'Did you mean public."Customers"?' in problems[1].hint
    assert problems[2].hint


def test_checks_suggest_similar_column_names(any_database: Database) -> None:
    problems = problems_of(any_database, {"name": "t", "exclude": ["foto"], "text": ["zzz"]})
    assert [problem.hint for problem in problems] == [
        'Did you mean "photo"?',
        "The columns of the table are id, note, photo.",
    ]


@pytest.mark.postgres(13)
def test_checks_name_root_of_partition_that_is_published_via_root(any_database: Database) -> None:
    any_database.sql(
        "CREATE TABLE r (id integer PRIMARY KEY) PARTITION BY RANGE (id);"
        "CREATE TABLE r1 PARTITION OF r FOR VALUES FROM (0) TO (10);"
        f"GRANT SELECT ON r TO {READER}; ALTER PUBLICATION p ADD TABLE r;"
        "ALTER PUBLICATION p SET (publish_via_partition_root = true)"
    )
    (problem,) = problems_of(any_database, "public.r1")
    assert "under the name of table public.r" in problem.message
    assert problem.hint == "List public.r under tables instead."
    assert problems_of(any_database, "public.r") == []


def test_checks_reject_publication_without_tables(any_database: Database) -> None:
    any_database.sql("CREATE PUBLICATION none")
    (problem,) = problems_of(any_database, publication="none")
    assert problem.message == 'publication "none" has no tables'


def test_checks_report_all_problems_at_once(any_database: Database) -> None:
    any_database.sql(
        f"ALTER ROLE {READER} NOREPLICATION; REVOKE SELECT ON t FROM {READER};"
        "ALTER TABLE t REPLICA IDENTITY NOTHING; ALTER PUBLICATION p SET (publish = 'insert')"
    )
    problems = problems_of(any_database, "public.t", "public.u")
    assert len(problems) == 5
    assert all(problem.hint for problem in problems)
    with pytest.raises(NotReady, match="may not replicate, and 4 more") as refused:
        require(problems, where="the shop")
    assert refused.value.problems == tuple(problems)
    for problem in problems:
        assert f"   hint: {problem.hint}" in refused.value.detail
    require([], where="the shop")


@pytest.mark.parametrize("made", [False, True], ids=["of somebody else", "of ours"])
def test_checks_report_problems_of_table_that_is_not_published_yet(
    any_database: Database, made: bool
) -> None:
    any_database.sql("CREATE TABLE u (id integer PRIMARY KEY); CREATE TABLE v (id integer)")
    problems = problems_of(any_database, "public.t", "public.u", "public.v", made=made)
    told = [problem.message for problem in problems]
    joining = [f'table public.{each} is not in publication "p"' for each in "uv" if not made]
    assert told[: len(joining)] == joining
    assert "table public.v has no replica identity" in told[len(joining)]
    assert told[len(joining) + 1 :] == [
        'role "reader" may not read table public.u',
        'role "reader" may not read table public.v',
    ]
    for problem in problems:
        run_hint(any_database, problem)
    assert problems_of(any_database, "public.t", "public.u", "public.v", made=made) == []


def test_create_publication_requires_privilege_and_creates_once(any_database: Database) -> None:
    config = configured(any_database, "public.t", user="postgres", publication="new")
    as_reader = configured(any_database, "public.t", publication="new")
    with connect(as_reader.parameters) as reader:
        assert not create_publication(reader, as_reader, creator=Creator("shop"))
    with connect(config.parameters) as owner:
        assert create_publication(owner, config, creator=Creator("shop"))
        assert not create_publication(owner, config, creator=Creator("shop"))
    assert problems_of(any_database, "public.t", publication="new") == []


def test_create_publication_after_another_source_keeps_existing_publication(
    any_database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configured(any_database, "public.t", user="postgres", publication="new")
    with connect(config.parameters) as connection:
        assert create_publication(connection, config, creator=Creator("shop"))
        monkeypatch.setattr(publication_setup, "may_create_publication", lambda *_: True)
        assert not create_publication(connection, config, creator=Creator("store"))
        assert read_creator(connection, "new") == Creator("shop")


def test_publication_comment_identifies_source_and_lake() -> None:
    creator = Creator.of("shop", "file:/lake")
    assert Creator.parse(str(creator)) == creator
    assert not creator.matches(Creator.of("shop", "file:/other"))
    assert not creator.matches(Creator.of("store", "file:/lake"))
    # Older comments do not name a lake.
    before = Creator.parse("made by penstock for source shop")
    assert before == Creator("shop")
    assert before is not None
    assert before.matches(creator)
    assert creator.matches(before)
    assert Creator.parse("of the analysts") is None


def test_create_publication_by_table_owner_succeeds_for_named_tables_only(
    any_database: Database,
) -> None:
    any_database.sql(
        f"ALTER TABLE t OWNER TO {READER}; GRANT CREATE ON DATABASE {any_database.name} TO {READER}"
    )
    config = configured(any_database, "public.t", publication="new")
    everything = configured(any_database, publication="all")
    with connect(config.parameters) as owner:
        assert create_publication(owner, config, creator=Creator("shop"))
        assert not create_publication(owner, everything, creator=Creator("shop"))


@pytest.mark.postgres(13)
def test_publication_statement_for_partitioned_table_publishes_via_root(
    any_database: Database,
) -> None:
    any_database.sql("CREATE TABLE r (id integer PRIMARY KEY) PARTITION BY RANGE (id)")
    config = configured(any_database, "public.r", user="postgres", publication="new")
    with connect(config.parameters) as connection:
        assert publication_statement(connection, config) == (
            "CREATE PUBLICATION new FOR TABLE public.r WITH (publish_via_partition_root = true);"
        )


def test_partitioned_table_before_version_13_is_rejected_and_its_partition_accepted(
    any_database: Database,
) -> None:
    any_database.sql(
        "CREATE TABLE r (id integer PRIMARY KEY) PARTITION BY RANGE (id);"
        "CREATE TABLE r1 PARTITION OF r FOR VALUES FROM (0) TO (10)"
    )
    asked = [
        configured(any_database, f"public.{name}", user="postgres", publication="new")
        for name in ("r", "r1")
    ]
    with connect(asked[0].parameters) as connection:
        older: Any = Older(connection, 120000)
        assert not create_publication(older, asked[0], creator=Creator("shop"))
        messages = [problem.message for problem in check(older, asked[0])]
        assert messages == [
            'publication "new" does not exist',
            (
                "public.r is a partitioned table, and before version 13 a server sends partitions "
                "under their own names only"
            ),
        ]
        assert create_publication(older, asked[1], creator=Creator("shop"))
        assert check(older, asked[1]) == []
        assert [problem.message for problem in check(older, asked[0])] == messages[1:]


def test_create_publication_for_view_is_not_attempted(any_database: Database) -> None:
    any_database.sql("CREATE VIEW v AS SELECT 1 AS i")
    config = configured(any_database, "public.v", user="postgres", publication="new")
    with connect(config.parameters) as connection:
        assert not create_publication(connection, config, creator=Creator("shop"))
        assert "public.v is a view" in check(connection, config)[1].message


@pytest.mark.parametrize("named", [True, False], ids=["named", "all"])
def test_create_publication_with_table_without_replica_identity_is_not_attempted(
    any_database: Database, named: bool
) -> None:
    any_database.sql("CREATE TABLE keyless (i integer)")
    tables = ["public.t", "public.keyless"] if named else []
    config = configured(any_database, *tables, user="postgres", publication="new")
    with connect(config.parameters) as connection:
        assert not create_publication(connection, config, creator=Creator("shop"))
        told = [problem.message for problem in check(connection, config)]
        assert told[0] == 'publication "new" does not exist'
        assert any("table public.keyless has no replica identity" in each for each in told)
        any_database.sql("ALTER TABLE keyless REPLICA IDENTITY FULL")
        assert create_publication(connection, config, creator=Creator("shop"))
    any_database.sql("INSERT INTO keyless VALUES (1); UPDATE keyless SET i = 2")


def test_check_hint_quotes_names_in_statements(any_database: Database) -> None:
    any_database.sql('CREATE SCHEMA "S"; CREATE TABLE "S"."a.b""c" (id integer PRIMARY KEY)')
    config = PostgresConfig(
        configured(any_database, user="postgres").parameters,
        publication="Odd one",
        tables=(TableSpec(TableName("S", 'a.b"c')),),
    )
    with connect(config.parameters) as connection:
        (problem,) = check(connection, config)
        run_hint(any_database, problem)
        assert check(connection, config) == []


def test_checks_of_server_settings_report_wal_level_slots_and_senders() -> None:
    settings = {
        "wal_level": "replica",
        "fsync": "off",
        "max_replication_slots": 1,
        "max_wal_senders": 1,
    }
    with PostgresServer(settings=settings) as server:
        server.sql("CREATE TABLE t (id integer PRIMARY KEY)")
        config = PostgresConfig.parse({"url": server.url(), "tables": ["t"]})
        with connect(config.parameters) as connection:
            problems = check(connection, config)
        assert [problem.message for problem in problems] == [
            "wal_level is replica, and must be logical",
            "of 1 replication slots 1 are free, and 2 are needed",
            "of 1 WAL senders 1 are free, and 2 are needed",
            'publication "penstock" does not exist',
        ]
        for problem in problems:
            for statement in re.findall(r"(?:ALTER SYSTEM|CREATE) [^;]+;", problem.hint):
                server.sql(statement)
        server.restart()
        with connect(config.parameters) as connection:
            assert check(connection, config) == []
            with connect(config.parameters, replication=True) as replication:
                ours = create_slot(replication, slot_name("shop", "abcd")).name
            # Our own slot is already in use, therefore one more slot is enough.
            assert not [
                each for each in check(connection, config, slot=ours) if "slot" in str(each)
            ]
            (problem,) = [each for each in check(connection, config) if "slot" in each.message]
            assert ours in problem.detail
