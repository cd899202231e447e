"""Conformance of every built-in connector.

`SKIPPED` lists the checks that do not apply to a connector. The tests compare the list
exactly: a check that is skipped by accident must not count as passed.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.connectors import BUILT_IN
from penstock.servers.postgres import Database
from penstock.testing.conformance import CHECKS, Config, Outcome, parse, run

FILES = Path(__file__).parent / "conformance"
ROOT = Path(__file__).parents[2]

NOT_REMOTE = {
    "open-returns-last-checkpoint",
    "joined-shard-resumes-from-last-checkpoint",
    "shard-joined-from-four-resumes-from-last-checkpoint",
    "zombie-cannot-commit",
    "checkpoint-survives-restart",
}
"""Skipped if the recovery log holds the checkpoint and is the fence."""

NOT_STAGED = {
    "zombie-staged-work-is-never-applied",
    "staged-work-is-applied-before-first-acknowledged",
    "staged-work-is-applied-once",
}
"""Skipped if the connector stages nothing."""

WRITTEN_THROUGH = {"load-omits-uncommitted-documents", "cancelled-store-is-rolled-back"}
"""Skipped if a transaction is visible before it commits."""

NOT_PLAIN = {"late-store-keeps-newer-document"}
"""Skipped if an older stream cannot commit, or has nothing to overwrite."""

LOADS = {
    "validate-reports-accepts-delete",
    "apply-delete-removes-data-and-checkpoint",
    "loaded-follows-acknowledged",
    "load-returns-stored-document",
    "load-of-missing-key-returns-nothing",
    "flushed-follows-last-loaded",
    "pipelined-load-returns-committed-document",
    "key-of-several-fields-is-accepted",
    "store-replaces-document",
    "store-with-deletes-removes-document",
    "delete-of-missing-key-is-no-error",
    "store-with-empties-truncates-at-commit",
    "store-with-late-or-partial-empties-is-rejected",
    "store-with-wrong-exists-keeps-one-document",
    "duplicate-key-in-transaction-is-rejected",
    "numbers-of-64-bits-are-exact",
    "nul-character-is-preserved-or-rejected",
    "cancelled-load-has-no-effect",
    "load-after-flush-is-rejected",
    "load-without-keys-is-rejected",
    "load-outside-arena-is-rejected",
    "load-with-reversed-slice-is-rejected",
    "load-of-missing-binding-is-rejected",
    "end-after-load-is-rejected",
}
"""Checks that load documents to verify the stored contents."""

SKIPPED: Mapping[str, set[str]] = {
    "sqlite": NOT_STAGED | NOT_PLAIN,
    "postgres": NOT_STAGED | NOT_PLAIN,
    "staged-files": NOT_REMOTE | NOT_PLAIN,
    "plain-files": NOT_REMOTE
    | NOT_STAGED
    | WRITTEN_THROUGH
    | {
        "delta-binding-appends-every-document",
        "delta-binding-with-empties-is-truncated",
        "delta-binding-transaction-is-committed",
    },
    "push-files": NOT_REMOTE
    | NOT_STAGED
    | NOT_PLAIN
    | WRITTEN_THROUGH
    | LOADS
    | {
        "second-open-fences-shard-in-store",
        "zombie-in-store-does-not-block-open",
        "delta-binding-with-empties-is-truncated",
    },
}


def config(name: str, replaced: Mapping[str, str]) -> Config:
    """Return the config of the YAML file with substrings replaced."""

    def substitute(value: Any) -> Any:
        match value:
            case dict():
                return {key: substitute(inner) for key, inner in value.items()}
            case list():
                return [substitute(inner) for inner in value]
            case str():
                for old, new in replaced.items():
                    value = value.replace(old, new)
                return sys.executable if value == "python" else value
            case _:
                return value

    return parse(substitute(yaml.safe_load((FILES / f"{name}.yaml").read_text())))


def check_conformance(name: str, replaced: Mapping[str, str]) -> None:
    report = run(config(name, replaced))
    skipped = {result.check.name for result in report.results if result.outcome is Outcome.SKIPPED}
    assert not report.failed, report.as_table()
    assert skipped == SKIPPED[name]
    assert [result.check.name for result in report.results] == list(CHECKS)


FILES_LONG = [
    pytest.param(name, marks=pytest.mark.long)
    for name in ("staged-files", "plain-files", "push-files")
]


@pytest.mark.parametrize("name", ["sqlite", *FILES_LONG])
def test_file_based_connector_passes_conformance_suite(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(ROOT)
    check_conformance(name, {"/tmp/penstock-conformance": str(tmp_path)})


@pytest.mark.long
def test_postgres_connector_passes_conformance_suite(
    database: Database, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(ROOT)
    replaced = {"postgresql://postgres@127.0.0.1:5432/conformance": database.url()}
    check_conformance("postgres", replaced)


def test_every_built_in_connector_has_a_conformance_config():
    assert SKIPPED.keys() == BUILT_IN.keys()
    assert {path.stem for path in FILES.glob("*.yaml")} == BUILT_IN.keys()
