"""`penstock init` writes a valid file without secrets and lists missing prerequisites."""

import sqlite3
from pathlib import Path

import pytest

from penstock import ingest, materialize
from penstock.cli.init import init
from penstock.errors import UsageError
from penstock.pipeline import load
from penstock.sources.postgres.names import TableName
from tests.fix_postgres import major

TABLES = """
CREATE TABLE orders (id int PRIMARY KEY, item text);
INSERT INTO orders VALUES (1, 'tea');
CREATE SCHEMA "Odd";
CREATE TABLE "Odd"."Or.d${HOME}ers" (id bigint PRIMARY KEY);
INSERT INTO "Odd"."Or.d${HOME}ers" VALUES (7);
CREATE TABLE "Odd"."ORDERS" (id bigint PRIMARY KEY);
CREATE TABLE measured (at float8 PRIMARY KEY);
INSERT INTO measured VALUES (0.5);
CREATE TABLE whole (word text);
ALTER TABLE whole REPLICA IDENTITY FULL;
INSERT INTO whole VALUES ('twice'), ('twice');
CREATE TABLE journal (line text);
CREATE UNLOGGED TABLE scratch (id int PRIMARY KEY);
"""


def test_init_writes_pipeline_file_that_runs_without_password_in_it(
    database, tmp_path, monkeypatch, capsys
):
    database.sql(TABLES)
    monkeypatch.chdir(tmp_path)
    password = database.server.password
    init(database.url(host="tcp", password=password), Path("shop.yaml"))
    output = capsys.readouterr().out
    text = Path("shop.yaml").read_text()
    assert password not in text + output
    variable = f"{database.name.upper()}_PASSWORD"
    assert output.splitlines() == [
        "wrote shop.yaml: 5 tables to replicate, 2 left out; the file lists the reasons",
        "next:",
        f"  export {variable}=…   # verbatim, without URL encoding",
        "  penstock up shop.yaml",
    ]
    assert "Prerequisites that the server" not in text
    assert "# Left out: table public.journal has no replica identity" in text
    assert "#   Run: ALTER TABLE public.journal REPLICA IDENTITY FULL;" in text
    assert "#   Run: ALTER TABLE public.scratch SET LOGGED;" in text

    pipeline = load("shop.yaml", {variable: password})
    ingest.run(pipeline, once=True)
    materialize.run(pipeline, jobs=materialize.LocalRunner(), once=True)
    with sqlite3.connect(f"{database.name}.db") as target:
        assert target.execute("SELECT id, item FROM public_orders").fetchall() == [(1, "tea")]
        assert target.execute('SELECT id FROM "Or.d${HOME}ers"').fetchall() == [(7,)]
        assert target.execute("SELECT at FROM measured").fetchall() == [(0.5,)]
        assert target.execute("SELECT word, mz_count FROM whole").fetchall() == [("twice", 2)]
        assert target.execute("SELECT * FROM Odd_ORDERS").fetchall() == []

    # The commented-out items are valid after the statements above them have run.
    database.sql("ALTER TABLE journal REPLICA IDENTITY FULL; ALTER TABLE scratch SET LOGGED")
    database.sql("ALTER PUBLICATION penstock ADD TABLE journal, scratch")
    for name in ("journal", "scratch"):
        for item in (f"- public.{name}", f"- {{collection: {database.name}.public.{name},"):
            text = text.replace(f"# {item}", item)
    Path("shop.yaml").write_text(
        text.replace(f"# {database.name}.public.journal:", f"{database.name}.public.journal:")
    )
    pipeline = load("shop.yaml", {variable: password})
    assert len(pipeline.sources[database.name].config.tables or ()) == 7
    assert len(pipeline.materializations["local"].bindings) == 7
    assert pipeline.collections[f"{database.name}.public.journal"].key == "row"


def test_init_of_server_that_is_not_ready_writes_statements_to_run(database, tmp_path, capsys):
    role = f"init_{database.name}"
    database.sql(TABLES)
    database.sql(f"CREATE ROLE {role} LOGIN")
    try:
        init(database.url(user=role), Path("-"))
        text = capsys.readouterr().out
        assert "as the owner of the tables: CREATE PUBLICATION" in text
        assert "# see above: it must be created" in text
        database.sql("CREATE PUBLICATION penstock FOR TABLE orders, whole")
        init(database.url(user=role), Path("-"))
    finally:
        database.sql(f"DROP ROLE {role}")
    printed = capsys.readouterr()
    text, errors = printed.out, printed.err
    path = tmp_path / "shop.yaml"
    path.write_text(text)
    tables = load(path, {}).sources[database.name].config.tables
    assert [str(table.name) for table in tables or ()] == ["public.orders", "public.whole"]
    assert f"#   Run: ALTER ROLE {role} REPLICATION;" in text
    assert f"#   Run: GRANT SELECT ON public.orders TO {role};" in text
    assert "#   Run: ALTER PUBLICATION penstock ADD TABLE public.measured;" in text
    assert "password" not in text
    assert "see above: it must be created" not in text
    assert errors.partition("next:\n")[2].splitlines() == [
        "  meet the prerequisites at the top of the file: the server is not ready",
        "  penstock up FILE",
    ]
    assert "export" not in errors


def test_init_without_replicable_table_writes_file_without_sources(database, tmp_path):
    database.sql('CREATE TABLE "a\nb: \u2028" (line text)')
    init(database.url(), tmp_path / "none.yaml")
    pipeline = load(tmp_path / "none.yaml", {})
    assert (pipeline.sources, pipeline.collections, pipeline.materializations) == ({}, {}, {})
    database.sql('ALTER TABLE "a\nb: \u2028" REPLICA IDENTITY FULL')
    init(database.url(), tmp_path / "one.yaml")
    pipeline = load(tmp_path / "one.yaml", {})
    (table,) = pipeline.sources[database.name].config.tables
    assert table.name == TableName("public", "a\nb: \u2028")
    assert list(pipeline.collections) == [f'{database.name}.public.U&"a\\000Ab: \\2028"']


def test_init_lists_columns_that_are_not_replicated_or_not_written(database, tmp_path, capsys):
    database.sql(
        'CREATE TABLE wide (id int PRIMARY KEY, "Name" text, name text, "Né" int, "NÉ" int,'
        ' "tw\nice" int GENERATED ALWAYS AS (id * 2) STORED)'
    )
    init(database.url(), tmp_path / "wide.yaml")
    output, text = capsys.readouterr().out, (tmp_path / "wide.yaml").read_text()
    generated = (
        'is not replicated: it is a generated column, which publication "penstock" does not send'
    )
    case = "columns Name, name of public.wide differ only in case: SQLite gets the first of them"
    assert f"        # column tw\N{REPLACEMENT CHARACTER}ice {generated}\n" in text
    assert f"column public.wide.tw\N{REPLACEMENT CHARACTER}ice {generated}\n" in output
    assert f"      # {case}" in text
    assert case in output
    # SQLite ignores case only for ASCII letters.
    assert (text + output).count("differ only in case") == 2
    assert len(load(tmp_path / "wide.yaml", {}).materializations["local"].bindings) == 1


def test_init_lists_partitioned_table_instead_of_its_partitions(database, tmp_path):
    database.sql("CREATE TABLE parted (id int PRIMARY KEY) PARTITION BY RANGE (id)")
    database.sql("CREATE TABLE part PARTITION OF parted FOR VALUES FROM (0) TO (9)")
    init(database.url(), tmp_path / "parted.yaml")
    tables = load(tmp_path / "parted.yaml", {}).sources[database.name].config.tables
    expected = "public.parted" if major(database) >= 13 else "public.part"
    assert [str(table.name) for table in tables or ()] == [expected]


def test_init_with_existing_file_raises_usage_error_and_keeps_file(database, tmp_path):
    path = tmp_path / "penstock.yaml"
    path.write_text("mine")
    with pytest.raises(UsageError, match="already exists"):
        init(database.url(), path)
    assert path.read_text() == "mine"
    with pytest.raises(UsageError, match="could not write file"):
        init(database.url(), tmp_path / "missing" / "penstock.yaml")


@pytest.mark.parametrize("url", ["mysql://u:s3cr3t@h/d", "kafka://h:9092/t", "shop.db", ""])
def test_init_with_other_url_scheme_raises_usage_error_without_password(url, tmp_path):
    with pytest.raises(UsageError, match="not a Postgres URL") as caught:
        init(url, tmp_path / "penstock.yaml")
    assert "postgresql://" in caught.value.hint
    assert "s3cr3t" not in f"{caught.value} {caught.value.detail}"
