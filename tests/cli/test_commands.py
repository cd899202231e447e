"""Output and exit status of the commands."""

import json
import logging
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from typer.main import get_command
from typer.testing import CliRunner

import penstock.persist as persist
from penstock.cli.log_format import FieldsFormatter
from penstock.cli.main import app
from penstock.errors import Fenced
from penstock.telemetry import fields
from tests.process_pipes import stdout_of

SETTINGS = persist.Settings(background=False, notify="")


def penstock(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "penstock.cli.main", *words],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def lines(result: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.fixture
def words(tmp_path: Path) -> str:
    url = f"file:{tmp_path / 'data'}"
    with persist.open(url, writer="w", settings=SETTINGS) as client:
        made = client.create_or_load("words", key=persist.TEXT, value=persist.BIGINT)
        made.compare_and_append([(("hello", 2**80), 1, 1), (("twice", -1), 2, 2)], 0, 3)
        made.compare_and_append([(("hello", 2**80), 4, -1)], 3, 5)
    return url


def test_read_prints_each_row_as_often_as_its_multiplicity(words):
    assert lines(penstock("read", words, "words", "--as-of", "2")) == [
        {"key": "hello", "value": 2**80},
        {"key": "twice", "value": -1},
        {"key": "twice", "value": -1},
    ]


def test_read_without_as_of_uses_latest_complete_time(words):
    assert lines(penstock("read", words, "words", "--json")) == [{"key": "twice", "value": -1}] * 2
    earliest = penstock("read", words, "words", "--as-of", "earliest")
    assert lines(earliest) == []


def test_read_accepts_rfc_3339_as_of_and_rejects_other_text(words):
    told = penstock("read", words, "words", "--as-of", "1970-01-01T00:00:00.002Z")
    assert len(lines(told)) == 3
    refused = penstock("read", words, "words", "--as-of", "noon")
    assert refused.returncode == 1
    assert "RFC 3339" in refused.stderr


@pytest.mark.parametrize(
    ("as_of", "says"), [("5", "Its upper is 5"), ("99999999", "Its upper is 5")]
)
def test_read_at_or_past_upper_fails_and_reports_upper(words, as_of, says):
    result = penstock("read", words, "words", "--as-of", as_of)
    assert result.returncode == 1
    assert says in result.stderr
    assert "Traceback" not in result.stderr


def test_read_below_since_fails_and_reports_since(words):
    with persist.open(words, writer="w", settings=SETTINGS) as client:
        client.collection("words").allow_compaction(3).result()
    result = penstock("read", words, "words", "--as-of", "2")
    assert result.returncode == 1
    assert "Its since is 3" in result.stderr


def test_read_of_unknown_collection_fails_and_lists_existing_ones(words):
    result = penstock("read", words, "wurst")
    assert result.returncode == 1
    assert '"words"' in result.stderr


def test_read_of_row_with_negative_multiplicity_fails(words):
    with persist.open(words, writer="w", settings=SETTINGS) as client:
        client.collection("words").compare_and_append([(("ghost", 1), 5, -1)], 5, 6)
    result = penstock("read", words, "words")
    assert result.returncode == 1
    assert "retracted more often" in result.stderr


def test_tail_prints_snapshot_then_every_change(words):
    told = lines(penstock("tail", words, "words", "--as-of", "1", "--until", "5"))
    assert told == [
        {"mz_timestamp": 1, "mz_diff": 1, "key": "hello", "value": 2**80},
        {"mz_timestamp": 2, "mz_diff": 2, "key": "twice", "value": -1},
        {"mz_timestamp": 4, "mz_diff": -1, "key": "hello", "value": 2**80},
    ]
    assert list(told[0]) == ["mz_timestamp", "mz_diff", "key", "value"]


def test_tail_without_snapshot_begins_after_as_of(words):
    told = lines(penstock("tail", words, "words", "--as-of", "1", "--until", "5", "--no-snapshot"))
    assert [line["mz_timestamp"] for line in told] == [2, 4]


def test_tail_until_is_exclusive_and_rejected_below_as_of(words):
    told = lines(penstock("tail", words, "words", "--as-of", "earliest", "--until", "4"))
    assert [line["mz_timestamp"] for line in told] == [1, 2]
    assert lines(penstock("tail", words, "words", "--as-of", "2", "--until", "2")) == []
    assert penstock("tail", words, "words", "--as-of", "3", "--until", "2").returncode == 1


def test_tail_prints_no_change_before_its_last_progress_line(words):
    told = lines(penstock("tail", words, "words", "--as-of", "1", "--until", "5", "--progress"))
    assert list(told[0]) == ["mz_timestamp", "mz_progressed", "mz_diff", "key", "value"]
    assert told[0] == {
        "mz_timestamp": 1, "mz_progressed": True, "mz_diff": None, "key": None, "value": None
    }  # fmt: skip
    assert told[-1]["mz_timestamp"] == 5
    assert told[-1]["mz_progressed"] is True
    promised = 0
    for line in told:
        assert line["mz_timestamp"] >= promised
        if line["mz_progressed"]:
            promised = line["mz_timestamp"]


def test_tail_prints_changes_of_writer_in_other_process(words):
    follower = subprocess.Popen(
        [sys.executable, "-m", "penstock.cli.main", "tail", words, "words", "--as-of", "4"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert json.loads(stdout_of(follower).readline())["mz_timestamp"] == 4
        with persist.open(words, writer="w") as client:
            found = client.collection("words")
            for time in range(5, 8):
                found.compare_and_append([(("new", time), time, 1)], time, time + 1)
                told = json.loads(stdout_of(follower).readline())
                assert (told["mz_timestamp"], told["value"]) == (time, time)
    finally:
        follower.kill()
        follower.communicate()


def test_read_prints_values_without_exact_json_form_as_text_and_bytes_as_base64(tmp_path):
    url = f"file:{tmp_path}"
    schema = pa.schema(
        [
            ("price", pa.decimal128(20, 3)),
            ("at", pa.timestamp("us", "UTC")),
            ("raw", pa.binary()),
            ("x", pa.float64()),
            ("tags", pa.list_(pa.string())),
            ("big", pa.uint64()),
        ]
    )
    with persist.open(url, writer="w", settings=SETTINGS) as client:
        rows = client.create_or_load("rows", schema=schema)
        table = pa.table(
            [
                pa.array(["1.500"]).cast(pa.decimal128(20, 3)),
                pa.array([1_000_001], pa.timestamp("us", "UTC")),
                pa.array([b"\x00\xff"]),
                pa.array([float("nan")]),
                pa.array([["a", None]], pa.list_(pa.string())),
                pa.array([2**64 - 1], pa.uint64()),
            ],
            schema=schema,
        )
        rows.compare_and_append(table, 0, 1, time=0)
    (row,) = lines(penstock("read", url, "rows"))
    assert row == {
        "price": "1.500",
        "at": "1970-01-01 00:00:01.000001Z",
        "raw": "AP8=",
        "x": "NaN",
        "tags": ["a", None],
        "big": 2**64 - 1,
    }


def test_status_reports_writer_collections_and_holds(words):
    client = persist.open(words, writer="w", settings=SETTINGS)
    client.hold("materialization-7").move({"words": 2})
    client.collection("words").allow_compaction(4).result()
    client.collection("words").write([(("later", 1), 9, 1)]).result()
    (told,) = lines(penstock("status", words, "--json"))
    (location,) = told["storage_locations"]
    assert location["writer"]["id"] == "w"
    (shown,) = location["collections"]
    assert (shown["name"], shown["since"], shown["upper"]) == ("words", 2, 5)
    assert shown["held_back_by"] == ["materialization-7"]
    assert shown["unsealed"] is True
    assert [hold["owner"] for hold in location["holds"]] == ["materialization-7"]
    people = penstock("status", words)
    assert people.returncode == 0
    assert "materialization-7" in people.stdout
    client.close()


def test_compact_takes_lock_of_killed_writer(words):
    kill_writer(words)
    assert lines(penstock("compact", words, "--json"))[0]["after"]["batches"] == 1


def test_release_of_lake_reports_only_locks_of_dead_writers(tmp_path):
    urls = {name: f"file:{tmp_path / name}" for name in ("a", "b", "c")}
    for name in ("a", "b"):
        kill_writer(urls[name])
    with persist.open(urls["c"], writer="alive", settings=SETTINGS):
        told = lines(penstock("release", f"file:{tmp_path}", "--json"))
        assert [(each["location"], each["released"]) for each in told] == [
            (urls["a"], "dead"),
            (urls["b"], "dead"),
        ]


def kill_writer(url):
    """Start a process that takes the lock of `url`, and kill it."""
    script = f"import sys, penstock.persist as p; c = p.open({url!r}, writer='dead'); "
    script += "print('open', flush=True); sys.stdin.read()"
    child = subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert stdout_of(child).readline() == "open\n"
    os.kill(child.pid, signal.SIGKILL)
    child.communicate()


def test_read_of_lake_finds_collection_in_its_storage_locations(tmp_path):
    for name in ("shop", "users"):
        with persist.open(f"file:{tmp_path / name}", writer="w", settings=SETTINGS) as client:
            made = client.create_or_load(f"{name}.rows", key=persist.TEXT, value=persist.UNIT)
            made.compare_and_append([((name, None), 0, 1)], 0, 1)
    lake = f"file:{tmp_path}"
    assert lines(penstock("read", lake, "users.rows")) == [{"key": "users", "value": None}]
    (told,) = lines(penstock("status", lake, "--json"))
    assert len(told["storage_locations"]) == 2
    assert penstock("verify", lake).returncode == 0


@pytest.mark.parametrize("verb", ["status", "read", "tail", "compact", "verify", "release"])
def test_command_has_help_and_rejects_url_without_storage_location(verb, tmp_path):
    assert "Usage" in penstock(verb, "--help").stdout
    rest = ["rows"] if verb in ("read", "tail") else []
    urls = (f"file:{tmp_path / 'missing'}", f"file:{tmp_path}", "ftp://somewhere")
    for url in urls if verb == "read" else urls[1:2]:
        result = penstock(verb, url, *rest)
        assert result.returncode == 1
        assert "error:" in result.stderr
        assert "hint:" in result.stderr


@pytest.fixture
def many(tmp_path: Path) -> str:
    """Return the URL of a collection that exceeds the buffer of a pipe."""
    url = f"file:{tmp_path / 'many'}"
    with persist.open(url, writer="w", settings=SETTINGS) as client:
        made = client.create_or_load("words", key=persist.TEXT, value=persist.UNIT)
        made.compare_and_append([((f"{i}" * 20, None), 0, 1) for i in range(20_000)], 0, 1)
    return url


def piped(tail: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run `penstock … tail` in a shell and return the exit status of penstock."""
    line = f"{shlex.join([sys.executable, '-m', 'penstock.cli.main', *words])} {tail}"
    return subprocess.run(
        ["bash", "-c", f"{line}; exit ${{PIPESTATUS[0]}}"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("verb", ["read", "tail"])
def test_output_pipe_closed_after_first_line_exits_0(many, verb):
    result = piped("| head -1", verb, many, "words")
    assert (result.returncode, result.stderr) == (0, "")
    assert len(result.stdout.splitlines()) == 1


@pytest.mark.parametrize("verb", ["read words", "status", "status --json", "verify"])
def test_output_pipe_closed_without_read_exits_0(words, verb):
    first, *rest = verb.split()
    result = piped("| true", first, words, *rest)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize("verb", ["read words", "status", "verify"])
def test_output_to_full_device_exits_1_and_reports_write_error(many, verb):
    first, *rest = verb.split()
    result = piped("> /dev/full", first, many, *rest)
    assert result.returncode == 1
    assert result.stderr.splitlines() == [
        "error: could not write to standard output",
        "detail: No space left on device.",
    ]


def test_text_log_format_appends_fields_as_key_value():
    record = logging.LogRecord("penstock.durable", logging.WARNING, "", 0, "store fails", (), None)
    vars(record).update(fields(key="log/7", attempts=3, error="not now", store=""))
    line = FieldsFormatter("%(levelname)s %(name)s: %(message)s").format(record)
    assert line == (
        'WARNING penstock.durable: store fails key=log/7 attempts=3 error="not now" store=""'
    )


def test_release_of_lake_with_two_live_writers_is_rejected(tmp_path):
    lake = f"file:{tmp_path}"
    urls = [f"{lake}/{name}" for name in ("shop", "users", "words")]
    clients = [persist.open(url, writer=url[-4:], settings=SETTINGS) for url in urls]
    clients.pop().close()
    refused = penstock("release", lake)
    assert refused.returncode == 1
    assert urls[0] in refused.stderr
    assert '"sers"' in refused.stderr
    assert urls[2] not in refused.stderr
    for client in clients:
        client.create_or_load("rows", key=persist.TEXT, value=persist.UNIT)
    clients.pop().close()
    told = lines(penstock("release", lake, "--json"))
    assert [each["released"] for each in told] == ["shop", None, None]
    with pytest.raises(Fenced):
        clients.pop().close()


def test_compact_while_other_compaction_holds_lock_does_not_fence_it(words):
    with persist.open(words, writer="penstock-compact", settings=SETTINGS):
        assert "penstock-compact" in penstock("compact", words).stderr
    assert penstock("compact", words).returncode == 0


def test_version_option_prints_version():
    assert penstock("--version").stdout.startswith("penstock ")


def test_read_status_and_verify_accept_object_store_url(object_url):
    with persist.open(object_url, writer="w", settings=SETTINGS) as client:
        made = client.create_or_load("words", key="text", value="unit")
        made.compare_and_append([(("hello", None), 1, 1)], 0, 2)
        made.compare_and_append([((f"{i}" * 100, None), 2, 1) for i in range(400)], 2, 3)
    assert lines(penstock("read", object_url, "words", "--as-of", "1")) == [
        {"key": "hello", "value": None}
    ]
    (told,) = lines(penstock("status", object_url, "--json"))
    assert told["storage_locations"][0]["collections"][0]["upper"] == 3
    assert penstock("verify", object_url).returncode == 0
    with persist.open(object_url, hold=False) as client:
        assert len(client.collection("words").snapshot(2)) == 401


def _command_lines(group: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield words
    for name, command in getattr(group, "commands", {}).items():
        yield from _command_lines(command, (*words, name))


def test_help_of_every_command_prints_no_bool_type():
    command_lines = list(_command_lines(get_command(app)))
    assert ("connector", "serve") in command_lines
    for words in command_lines:
        result = CliRunner().invoke(app, [*words, "--help"])
        assert result.exit_code == 0
        assert "--help" in result.output
        assert "<bool>" not in result.output, words
