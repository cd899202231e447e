"""The vectors of family D: schema changes at the source, each compared with its outcome.

A change is compatible if its table is equal to its collection afterwards, followed or repaired by
a comparison. Otherwise the table is errored, and with scope "source" all tables are.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest

from penstock.servers.postgres import Database
from tests.ingest.pump import SOURCE
from tests.ingest.scripted_ingest import ScriptedIngest

CASES: Final = {
    case["id"]: case
    for case in json.loads(
        (Path(__file__).parents[1] / "vectors" / "materialize.json").read_text()
    )["cases"]
    if case["family"] == "pg_schema_change"
}

DECIDED: Final = {
    "D12": "a wider type is followed",
    "D13": "a type whose values the collection can hold is compared and followed",
    "D18": "TRUNCATE retracts all rows",
}
"""Vectors that are incompatible there and compatible here, with the decision."""


@dataclass(frozen=True)
class Change:
    """Statements of one vector, for a table with the name of the vector."""

    columns: str
    statements: tuple[str, ...]
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the table in the pipeline file."""


CHANGES: Final = {
    "D02": Change("id int PRIMARY KEY, a int", ("ALTER TABLE {t} DROP COLUMN a",)),
    "D08": Change(
        "id int PRIMARY KEY, a int",
        ("ALTER TABLE {t} DROP CONSTRAINT {t}_pkey", "ALTER TABLE {t} ADD PRIMARY KEY (id)"),
    ),
    "D09": Change(
        "id int NOT NULL, a int",
        ("ALTER TABLE {t} ADD PRIMARY KEY (id)", "ALTER TABLE {t} DROP CONSTRAINT {t}_pkey"),
    ),
    "D11": Change("id int PRIMARY KEY, a int", ("ALTER TABLE {t} ADD UNIQUE (a)",)),
    "D12": Change(
        "id int PRIMARY KEY, a varchar(2)", ("ALTER TABLE {t} ALTER a TYPE varchar(20)",)
    ),
    "D13": Change(
        "id int PRIMARY KEY, a decimal(5,2)", ("ALTER TABLE {t} ALTER a TYPE decimal(6,1)",)
    ),
    "D17": Change(
        "id int PRIMARY KEY, a int",
        (
            "ALTER TABLE {t} ADD COLUMN f3 int",
            "INSERT INTO {t} VALUES (11, 1, 1)",
            "ALTER TABLE {t} DROP COLUMN f3",
            "INSERT INTO {t} VALUES (12, 1)",
        ),
    ),
    "D18": Change("id int PRIMARY KEY, a int", ("TRUNCATE {t}",)),
    "D19": Change("id int PRIMARY KEY, a int", ("DROP TABLE {t}",)),
    "D21": Change(
        "id int PRIMARY KEY, a int", ("ALTER TABLE {t} ALTER a TYPE bigint",), {"text": ["a"]}
    ),
    "D26": Change(
        "id int PRIMARY KEY, a int",
        (
            "ALTER PUBLICATION penstock DROP TABLE {t}",
            "INSERT INTO {t} VALUES (11, 1)",
            "ALTER PUBLICATION penstock ADD TABLE {t}",
        ),
    ),
    "D28": Change(
        "id int PRIMARY KEY, a int, b int", ("ALTER TABLE {t} DROP COLUMN b",), {"exclude": ["b"]}
    ),
    # The last one, because it affects all tables.
    "D27": Change("id int PRIMARY KEY, a int", ("DROP PUBLICATION penstock",)),
}


@pytest.fixture
def ingest(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ScriptedIngest]:
    ingest = ScriptedIngest(database, tmp_path, monkeypatch)
    yield ingest
    ingest.close()


def test_schema_change_has_the_outcome_of_its_vector(
    ingest: ScriptedIngest, database: Database
) -> None:
    assert CHANGES.keys() == CASES.keys()
    tables = {id: id.lower() for id in CHANGES}
    for id, table in tables.items():
        database.sql(f"CREATE TABLE {table} ({CHANGES[id].columns})")
        database.sql(f"ALTER TABLE {table} REPLICA IDENTITY FULL")
        database.sql(f"INSERT INTO {table} (id) SELECT g FROM generate_series(1, 5) g")
    database.sql(f"CREATE PUBLICATION penstock FOR TABLE {', '.join(tables.values())}")
    ingest.start(tables=[{"name": f"public.{tables[id]}", **CHANGES[id].options} for id in CHANGES])
    assert errored(ingest) == set()
    outcomes = {}
    for id, change in CHANGES.items():
        before = errored(ingest)
        with ingest.between_ticks():
            for statement in change.statements:
                database.sql(statement.format(t=tables[id]))
        ingest.report()
        failed = errored(ingest) - before
        if failed <= {tables[id]}:
            outcomes[id] = {"compatible": not failed, "scope": "table"}
        else:
            assert failed | before == {*tables.values()}
            outcomes[id] = {"compatible": False, "scope": "source"}
    assert outcomes == {
        id: {**CASES[id]["expect"], **({"compatible": True} if id in DECIDED else {})}
        for id in CHANGES
    }


def errored(ingest: ScriptedIngest) -> set[str]:
    """Return the tables whose collection is errored; all others are equal to their table."""
    states = {
        name.removeprefix(f"{SOURCE}.public."): state for name, state in ingest.states.items()
    }
    unequal = {table for table, state in states.items() if not state.startswith("equal")}
    assert all("is in error" in states[table] for table in unequal), states
    return unequal
