"""Output of `penstock plan` and `penstock up` for objects that the file omits or that fail."""

import subprocess
import sys
from pathlib import Path

import pytest

from penstock.catalog.objects import RequestedObject, known_objects, update_catalog
from penstock.servers.postgres import Database
from tests.cli.test_commands import penstock


@pytest.fixture
def lake(tmp_path: Path) -> str:
    """Return a lake with a materialization that has written nothing."""
    url = f"file:{tmp_path / 'lake'}"
    definition = {"connector": "sqlite", "endpoint": {"path": "desk.db"}, "bindings": []}
    update_catalog(url, lambda _: [RequestedObject("desk", "materialization", definition)])
    return url


@pytest.fixture
def file(tmp_path: Path, lake: str) -> str:
    """Return a pipeline file without sources and materializations."""
    path = tmp_path / "shop.yaml"
    path.write_text(f"location: {lake}\n")
    return str(path)


def test_plan_with_drop_prints_up_command_with_allow_drop(file: str) -> None:
    planned = penstock("plan", file)
    assert planned.returncode == 0
    drop, last = planned.stdout.splitlines()
    assert drop.startswith('drop materialization "desk"')
    assert last.endswith(f"penstock up {file} --allow-drop")
    assert len(penstock("plan", file, "--json").stdout.splitlines()) == 1


def test_up_with_allow_drop_drops_last_object_and_reports_nothing_to_run(
    lake: str, file: str
) -> None:
    refused = penstock("up", file, "--http", "none")
    assert refused.returncode == 1
    assert "--allow-drop" in refused.stderr
    assert len(known_objects(lake)) == 1
    ended = penstock("up", file, "--http", "none", "--allow-drop")
    assert ended.returncode == 0, ended.stderr
    assert "dropped; the file has no tasks to run" in ended.stderr
    assert known_objects(lake) == []


UNREACHABLE_AND_WRONG = """\
location: file:{folder}/lake
sources:
  shop:
    postgres: {{url: "{url}", tables: [public.a]}}
  clicks:
    kafka: {{brokers: "127.0.0.1:1", topic: clicks, format: json, envelope: none}}
materializations:
  remote:
    connector: postgres
    endpoint: {{host: localhost, port: "abc", user: u, database: d}}
    bindings: [{{collection: shop.public.a, resource: {{table: a}}}}]
"""


def test_plan_with_unreachable_broker_and_wrong_port_exits_1_and_creates_nothing(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_ANSWER_TIMEOUT", "2")
    database.sql("CREATE TABLE a (id int PRIMARY KEY)")
    file = tmp_path / "shop.yaml"
    file.write_text(UNREACHABLE_AND_WRONG.format(folder=tmp_path, url=database.url()))
    planned = penstock("plan", str(file))
    assert planned.returncode == 1, planned.stderr
    lines = planned.stdout.splitlines()
    (broker,) = [number for number, line in enumerate(lines) if line.startswith("unreachable")]
    assert 'source "clicks": topic "clicks" at 127.0.0.1:1 cannot be reached' in lines[broker]
    assert lines[broker + 2] == (
        "  hint: Check brokers, tls and sasl of the source, and the network."
    )
    (port,) = [number for number, line in enumerate(lines) if line.startswith("refuse")]
    assert 'value of key "port" of endpoint is not valid' in lines[port]
    assert lines[port + 2].startswith("  hint: Give a value of type integer")
    assert "error: plan has 2 problems" in planned.stderr
    combined = subprocess.run(
        [sys.executable, "-m", "penstock.cli.main", "plan", str(file)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    ).stdout
    assert combined.index("unreachable") < combined.index("error: plan has 2 problems")
    slots = "SELECT slot_name FROM pg_replication_slots WHERE database = current_database()"
    assert database.sql(slots) == []
    assert database.sql("SELECT pubname FROM pg_publication") == []
    assert [path.name for path in tmp_path.iterdir()] == ["shop.yaml"]
