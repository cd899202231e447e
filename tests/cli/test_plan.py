"""What `penstock plan` and `penstock up` say of what a file leaves out."""

from pathlib import Path

import pytest

from penstock.catalog.objects import Wanted, catalogued, known_objects
from tests.cli.test_verbs import penstock


@pytest.fixture
def lake(tmp_path: Path) -> str:
    """One with a materialization that has written nothing yet."""
    url = f"file:{tmp_path / 'lake'}"
    said = {"connector": "sqlite", "endpoint": {"path": "desk.db"}, "bindings": []}
    catalogued(url, lambda _: [Wanted("desk", "materialization", said)])
    return url


@pytest.fixture
def file(tmp_path: Path, lake: str) -> str:
    """One that has nothing to run."""
    path = tmp_path / "shop.yaml"
    path.write_text(f"location: {lake}\n")
    return str(path)


def test_a_plan_that_drops_says_what_must_be_said_for_it(file: str) -> None:
    planned = penstock("plan", file)
    assert planned.returncode == 0
    drop, last = planned.stdout.splitlines()
    assert drop.startswith('drop materialization "desk"')
    assert last.endswith(f"penstock up {file} --allow-drop")
    assert len(penstock("plan", file, "--json").stdout.splitlines()) == 1


def test_up_drops_the_last_if_allowed_and_says_that_nothing_is_left(lake: str, file: str) -> None:
    refused = penstock("up", file, "--http", "none")
    assert refused.returncode == 1
    assert "--allow-drop" in refused.stderr
    assert len(known_objects(lake)) == 1
    ended = penstock("up", file, "--http", "none", "--allow-drop")
    assert ended.returncode == 0, ended.stderr
    assert "that is dropped, and the file has nothing to run" in ended.stderr
    assert known_objects(lake) == []
