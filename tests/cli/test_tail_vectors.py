"""The vectors of tests/vectors/materialize.json about TAIL and SUBSCRIBE, for `penstock tail`.

Q10 and Q11 are other envelopes of SUBSCRIBE, which `penstock tail` does not have.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from typer.testing import CliRunner

import penstock.persist as persist
from penstock.cli.main import app

CASES = {
    case["id"]: case
    for case in json.loads(
        (Path(__file__).parents[1] / "vectors" / "materialize.json").read_text()
    )["cases"]
}

Update = tuple[Any, int, int]
"""Value, time, diff."""


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file:{tmp_path / 'data'}"


def append(
    url: str, column: str, data_type: pa.DataType, updates: Sequence[Update], upper: int
) -> None:
    """Append updates of one column to collection "rows"."""
    settings = persist.Settings(background=False, notify="")
    with persist.open(url, writer="w", settings=settings) as client:
        rows = client.create_or_load("rows", schema=pa.schema([(column, data_type)]))
        changes = [({column: value}, time, diff) for value, time, diff in updates]
        rows.compare_and_append(changes, rows.upper, upper)


def tail(url: str, *options: str) -> list[dict[str, Any]]:
    result = CliRunner().invoke(app, ["tail", url, "rows", *options])
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_tail_consolidates_the_snapshot_at_as_of(url: str) -> None:
    given, expected = CASES["Q01"]["given"], CASES["Q01"]["expect"]
    append(url, "f1", pa.int64(), [(value, 5, 1) for (value,) in given["rows"]], 8)
    lines = tail(url, "--as-of", "7", "--until", "8")
    assert all([*line] == expected["columns"] for line in lines)
    output = [
        ["T" if time == 7 else time, *rest] for time, *rest in (line.values() for line in lines)
    ]
    assert sorted(output, key=str) == sorted(expected["output"], key=str)


def test_tail_with_progress_has_null_columns_in_progress_lines(url: str) -> None:
    given, expected = CASES["Q03"]["given"], CASES["Q03"]["expect"]
    updates = [(value, time, diff) for time, diff, value in given["updates"]]
    append(url, "column1", pa.string(), updates, given["frontier"])
    lines = tail(url, "--as-of", "0", "--until", str(given["frontier"]), "--progress")
    assert all([*line] == expected["columns"] for line in lines)
    output = [[*line.values()] for line in lines]
    # The first progress line, at as_of, ends the snapshot.
    assert [line for line in output if not line[1]] == expected["output"][:-1]
    assert output[-1] == expected["output"][-1]


def test_tail_without_snapshot_prints_only_later_changes(url: str) -> None:
    given, expected = CASES["Q04"]["given"], CASES["Q04"]["expect"]
    append(url, "f1", pa.int64(), [(value, 5, 1) for value in given["existing"]], 8)
    append(url, "f1", pa.int64(), [(value, 9, 1) for value in given["then"]], 10)
    lines = tail(url, "--as-of", "7", "--until", "10", "--no-snapshot")
    assert [["T", line["mz_diff"], line["f1"]] for line in lines] == expected["output"]


def test_tail_as_of_a_later_time_prints_the_snapshot_at_that_time(url: str) -> None:
    given, expected = CASES["Q05"]["given"], CASES["Q05"]["expect"]
    append(url, "f1", pa.int64(), [(1, given["insert_time"], 1)], given["as_of"] + 1)
    (line,) = tail(url, "--as-of", str(given["as_of"]), "--until", str(given["as_of"] + 1))
    assert line["mz_timestamp"] == expected["mz_timestamp"]


def test_tail_resumed_below_its_last_progress_line_misses_nothing(url: str) -> None:
    last_progress, expected = CASES["Q13"]["given"]["last_progress"], CASES["Q13"]["expect"]
    append(url, "f1", pa.int64(), [(1, last_progress - 1, 1)], last_progress)
    lines = tail(url, "--as-of", "0", "--until", str(last_progress), "--progress")
    assert lines[-1]["mz_timestamp"] == last_progress
    append(url, "f1", pa.int64(), [(2, last_progress, 1)], last_progress + 1)

    def resume(as_of: int) -> list[int]:
        until = str(last_progress + 1)
        return [
            line["f1"]
            for line in tail(url, "--as-of", str(as_of), "--until", until, "--no-snapshot")
        ]

    assert expected["snapshot"] is False
    assert resume(expected["restart_as_of"]) == [2]
    assert resume(last_progress) == [], "a restart as of the progress line itself loses a change"
