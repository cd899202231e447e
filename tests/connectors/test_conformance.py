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
from penstock.testing.conformance import CHECKS, Config, Outcome, parse, run
from penstock.testing.postgres import Database

FILES = Path(__file__).parent / "conformance"
ROOT = Path(__file__).parents[2]

NOT_REMOTE = {
    "open-returns-the-last-checkpoint",
    "fence-join",
    "fence-join-of-four",
    "zombie-cannot-commit",
    "checkpoint-survives-restart",
}
"""Skipped if the recovery log holds the checkpoint and is the fence."""

NOT_STAGED = {
    "zombie-stages-in-vain",
    "staged-work-applied-on-first-acknowledge",
    "staged-work-applied-once",
}
"""Skipped if the connector stages nothing."""

WRITTEN_THROUGH = {"load-sees-only-what-is-committed", "cancelled-stream-is-rolled-back"}
"""Skipped if a transaction is visible before it commits."""

NOT_PLAIN = {"older-never-overwrites-newer"}
"""Skipped if an older stream cannot commit, or has nothing to overwrite."""

LOADS = {
    "validate-announces-deletes",
    "apply-delete-takes-away",
    "no-loaded-before-acknowledged",
    "load-returns-what-was-stored",
    "load-missing-key-omitted",
    "flushed-after-last-loaded",
    "pipelined-loads-see-the-commit",
    "several-key-fields",
    "update-overwrites",
    "deletes-remove",
    "delete-of-a-missing-key",
    "empties-remove-all",
    "empties-first-and-all",
    "exists-is-a-hint",
    "duplicate-key-refused",
    "odd-numbers",
    "nul-is-kept-or-refused",
    "cancelled-load-is-forgotten",
    "malformed-load-after-flush",
    "malformed-load-without-keys",
    "malformed-load-outside-arena",
    "malformed-load-slice-backwards",
    "malformed-load-unknown-binding",
    "malformed-end-after-load",
}
"""Checks that load documents to verify the stored contents."""

SKIPPED: Mapping[str, set[str]] = {
    "sqlite": NOT_STAGED | NOT_PLAIN,
    "postgres": NOT_STAGED | NOT_PLAIN,
    "staged-files": NOT_REMOTE | NOT_PLAIN,
    "plain-files": NOT_REMOTE
    | NOT_STAGED
    | WRITTEN_THROUGH
    | {"delta-binding-appends", "delta-binding-is-emptied", "delta-binding-flushes"},
    "push-files": NOT_REMOTE
    | NOT_STAGED
    | NOT_PLAIN
    | WRITTEN_THROUGH
    | LOADS
    | {"second-open-ends-a-store", "zombie-in-store-holds-nothing", "delta-binding-is-emptied"},
}


def config(name: str, replaced: Mapping[str, str]) -> Config:
    """Return the config of the YAML file with substrings replaced."""

    def here(value: Any) -> Any:
        match value:
            case dict():
                return {key: here(inner) for key, inner in value.items()}
            case list():
                return [here(inner) for inner in value]
            case str():
                for old, new in replaced.items():
                    value = value.replace(old, new)
                return sys.executable if value == "python" else value
            case _:
                return value

    return parse(here(yaml.safe_load((FILES / f"{name}.yaml").read_text())))


def keeps_every_rule(name: str, replaced: Mapping[str, str]) -> None:
    report = run(config(name, replaced))
    skipped = {each.check.name for each in report.results if each.outcome is Outcome.SKIPPED}
    assert not report.failed, report.as_table()
    assert skipped == SKIPPED[name]
    assert [each.check.name for each in report.results] == list(CHECKS)


FILES_LONG = [
    pytest.param(name, marks=pytest.mark.long)
    for name in ("staged-files", "plain-files", "push-files")
]


@pytest.mark.parametrize("name", ["sqlite", *FILES_LONG])
def test_file_based_connector_passes_conformance_suite(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(ROOT)
    keeps_every_rule(name, {"/tmp/penstock-conformance": str(tmp_path)})


@pytest.mark.long
def test_postgres_connector_passes_conformance_suite(
    database: Database, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(ROOT)
    replaced = {"postgresql://postgres@127.0.0.1:5432/conformance": database.url()}
    keeps_every_rule("postgres", replaced)


def test_every_built_in_connector_has_a_conformance_config():
    assert SKIPPED.keys() == BUILT_IN.keys()
    assert {each.stem for each in FILES.glob("*.yaml")} == BUILT_IN.keys()
