"""Self-test of the conformance suite: correct connectors pass, planted defects fail."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import UsageError
from penstock.testing.conformance import (
    CHECKS,
    Config,
    Need,
    Outcome,
    Pattern,
    Report,
    check,
    parse,
    run,
)
from penstock.testing.conformance.process import Connectors
from penstock.testing.conformance.redaction import hider
from penstock.testing.conformance.report import Result
from tests.conformance.defects import DEFECTS, PUSHED, REMOTE, STAGED, WRITTEN, Defect

HERE = Path(__file__).parent

LOG = {
    "open-returns-last-checkpoint",
    "joined-shard-resumes-from-last-checkpoint",
    "shard-joined-from-four-resumes-from-last-checkpoint",
    "checkpoint-survives-restart",
}
STAGING = {
    "zombie-staged-work-is-never-applied",
    "staged-work-is-applied-before-first-acknowledged",
    "staged-work-is-applied-once",
}
FENCED = {"zombie-cannot-commit"}
ISOLATED = {"load-omits-uncommitted-documents", "cancelled-store-is-rolled-back"}
COMPARED = {"late-store-keeps-newer-document"}

SKIPPED = {
    REMOTE: STAGING | COMPARED,
    STAGED: LOG | FENCED | COMPARED,
    WRITTEN: LOG | FENCED | STAGING | ISOLATED,
    PUSHED: LOG
    | FENCED
    | STAGING
    | ISOLATED
    | COMPARED
    | {name for name, each in CHECKS.items() if {Need.LOADS, Need.DELETES} & {*each.needs}}
    | {
        "validate-reports-accepts-delete",
        "second-open-fences-shard-in-store",
        "zombie-in-store-does-not-block-open",
    }
    | {"delta-binding-with-empties-is-truncated"},
}


def described(
    folder: Path,
    pattern: str,
    *,
    defect: str = "",
    command: bool = True,
    read: bool = True,
    patience_s: float = 30,
    settle_s: float = 0.1,
) -> Config:
    path = str(folder / "plain.db")
    of_process = defect.removeprefix("process:") if defect.startswith("process:") else ""
    return parse(
        {
            "endpoint": {"path": path, "mode": pattern, "defect": defect},
            "resource": {"table": "{name}"},
            "pattern": pattern,
            "accepts_delete": pattern != PUSHED,
            "command": [
                sys.executable,
                str(HERE / "plain.py"),
                "--listen",
                "{address}",
                "--defect",
                of_process,
            ]
            if command
            else [],
            "read": [sys.executable, "-S", "-E", str(HERE / "rows.py"), path, "{name}"]
            if read
            else [],
            "patience_s": patience_s,
            "settle_s": settle_s,
        }
    )


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield the address of a connector that serves all tests of the module."""
    folder = tmp_path_factory.mktemp("serving")
    connectors = Connectors(described(folder, REMOTE), None, folder)
    yield connectors.connection().address
    connectors.close()


def names(report: Report, outcome: Outcome) -> set[str]:
    return {each.check.name for each in report.results if each.outcome is outcome}


@pytest.mark.parametrize(
    "pattern",
    [
        pytest.param(each.value, marks=() if each.value == REMOTE else pytest.mark.long)
        for each in Pattern
    ],
)
def test_correct_connector_passes_every_check_of_its_pattern(pattern: str, tmp_path: Path) -> None:
    seen: list[Result] = []
    report = run(described(tmp_path, pattern), on_result=seen.append)
    assert not report.failed, report.as_table()
    assert tuple(seen) == report.results
    assert names(report, Outcome.SKIPPED) == SKIPPED[pattern]
    assert names(report, Outcome.PASSED) == CHECKS.keys() - SKIPPED[pattern]
    assert all(each.reason for each in report.results if each.outcome is Outcome.SKIPPED)


@pytest.mark.parametrize("defect", DEFECTS, ids=str)
def test_connector_with_defect_fails_the_check_for_it(
    defect: Defect, tmp_path: Path, serving: str
) -> None:
    started = defect.process or Need.COMMAND in CHECKS[defect.check].needs
    config = described(
        tmp_path,
        defect.pattern,
        defect=f"process:{defect.name}" if defect.process else defect.name,
        command=started,
        patience_s=1.5 if defect.hangs else 30,
        settle_s=0.6,
    )
    report = run(config, None if started else serving, only=[defect.check])
    (result,) = report.results
    assert result.outcome is Outcome.FAILED, report.as_table()
    assert defect.says in result.reason, report.as_table()


def test_each_check_has_a_defect() -> None:
    assert CHECKS.keys() == {each.check for each in DEFECTS}


def test_run_without_command_and_read_skips_checks_that_need_them(
    tmp_path: Path, serving: str
) -> None:
    config = described(tmp_path, PUSHED, command=False, read=False)
    blind = [
        "bindings-have-separate-documents",
        "large-document-is-stored",
        "delta-binding-appends-every-document",
        "restart-after-open-resumes",
    ]
    refused = "second-open-is-rejected"
    report = run(config, serving, only=[*blind, refused])
    assert names(report, Outcome.SKIPPED) == set(blind)
    (passed,) = (each for each in report.results if each.outcome is Outcome.PASSED)
    assert passed.check.name == refused
    assert "was not inspected" in passed.notes[0]


def test_delta_only_connector_is_verified_through_read_command(tmp_path: Path) -> None:
    config = described(tmp_path, STAGED)
    config.endpoint["delta_only"] = True
    seen = [
        "valid-message-orders-are-accepted",
        "slices-in-any-order-are-accepted",
        "cancelled-store-is-rolled-back",
        "second-open-fences-shard-in-store",
        "split-shards-resume-from-parent-checkpoint",
        "restart-after-started-commit-resumes",
        "staged-work-is-applied-before-first-acknowledged",
    ]
    report = run(
        config, only=[*seen, "store-replaces-document", "load-of-missing-key-returns-nothing"]
    )
    assert names(report, Outcome.PASSED) == set(seen), report.as_table()
    assert names(report, Outcome.SKIPPED) == {
        "store-replaces-document",
        "load-of-missing-key-returns-nothing",
    }


def test_report_of_failed_check_redacts_endpoint_password(tmp_path: Path, serving: str) -> None:
    config = described(tmp_path, REMOTE, command=False)
    config.endpoint["password"] = "not applied"
    config.endpoint["defect"] = "dry-run-deletes"
    report = run(config, serving, only=["apply-dry-run-changes-nothing"])
    assert "***" in report.as_table()
    assert "not applied" not in report.as_table()
    assert "not applied" not in report.as_json()


def test_unexpected_exception_in_check_is_reported_redacted(
    tmp_path: Path, serving: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def body(_: Any) -> None:
        raise KeyError("hush/hush")

    monkeypatch.setitem(check._CHECKS, "stumbles", check.Check("stumbles", "none", "none", body))
    config = described(tmp_path, REMOTE, command=False)
    config.endpoint["password"] = "hush/hush"
    report = run(config, serving, only=["stumbles", "first-transaction-is-acknowledged"])
    (failed,) = report.failed
    assert failed.reason == "the connector failed: KeyError: '***'"
    assert names(report, Outcome.PASSED) == {"first-transaction-is-acknowledged"}


def test_failed_check_reports_redacted_connector_output(tmp_path: Path) -> None:
    config = described(tmp_path, REMOTE, defect="forgets-on-open")
    config.endpoint["password"] = "hush/hush"
    script = 'echo opens hush/hush, postgresql://me:hush%2Fhush@host >&2; exec "$@"'
    started = config.model_copy(update={"command": ("sh", "-c", script, "sh", *config.command)})
    (result,) = run(started, only=["restart-after-open-resumes"]).failed
    assert "▸ kill -9" in " ".join(result.messages)
    assert result.printed == ("opens ***, postgresql://me:***@host",)
    table = Report((result,)).as_table()
    assert "last lines of the connector:\n    opens ***" in table


@given(
    st.text(
        st.characters(codec="utf-8", exclude_characters="*", exclude_categories=["Ll"]), min_size=4
    ),
    st.sampled_from([str, repr, json.dumps, lambda it: quote(it, "")]),
)
def test_hider_redacts_every_encoding_of_a_secret(secret: str, written: Any) -> None:
    config = described(Path(), REMOTE)
    config.endpoint["url"] = f"postgresql://me:{quote(secret, '')}@host/db"
    config.endpoint["deeper"] = [{"api_key": secret}]
    said = hider(config)(f"<{written(secret)}> and {config.endpoint['url']}")
    assert secret not in said
    assert quote(secret, "") not in said
    assert said.endswith("> and postgresql://me:***@host/db")


def test_hider_redacts_multiline_key_per_line() -> None:
    config = described(Path(), REMOTE)
    config.endpoint["private_key"] = "-----BEGIN-----\nc2VjcmV0IQ==\nabc\n"
    assert hider(config)("[1] c2VjcmV0IQ==\n[2] abc") == "[1] ***\n[2] abc"


def test_failed_check_reports_rule_and_last_messages(tmp_path: Path, serving: str) -> None:
    config = described(tmp_path, REMOTE, defect="null-for-missing", command=False)
    report = run(
        config,
        serving,
        only=["load-of-missing-key-returns-nothing", "first-transaction-is-acknowledged"],
    )
    table = report.as_table()
    assert "no document for a missing key (protocol, Load)" in table
    assert "stream 1 ▸ Load of 1 keys of binding 0" in table
    assert table.endswith("1 passed, 1 failed, 0 skipped")
    said = json.loads(report.as_json())
    assert (said["passed"], said["failed"], said["skipped"]) == (1, 1, 0)
    assert [each["outcome"] for each in said["checks"]] == ["passed", "failed"]


def test_run_without_connector_raises_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no connector to check"):
        run(described(tmp_path, REMOTE, command=False))


def test_run_with_command_that_exits_raises_usage_error_with_its_output(tmp_path: Path) -> None:
    config = described(tmp_path, REMOTE).model_copy(
        update={"command": (sys.executable, "-c", "raise SystemExit('no such endpoint: hush')")}
    )
    config.endpoint["password"] = "hush"
    with pytest.raises(UsageError, match=r"did not listen.*ended with status 1") as caught:
        run(config)
    assert "no such endpoint: ***" in caught.value.detail


def test_run_with_nonexistent_check_raises_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match='check "fence" does not exist'):
        run(described(tmp_path, REMOTE), only=["fence"])
