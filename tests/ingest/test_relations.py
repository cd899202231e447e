"""What a source wrote down for itself, read by others while it goes on."""

from pathlib import Path
from typing import Any

import pytest

from penstock import persist
from penstock.ingest.relations import notes_in
from penstock.persist import Collection
from penstock.persist.memory import Memory


def test_notes_that_go_on_between_two_looks_are_looked_at_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"file:{tmp_path}/shop"
    with persist.open(url, writer="w") as client:
        memory = Memory(client, "shop")
        memory.write_down({"status": 1})
        snapshot, turns = Collection.snapshot, [2, 3]

        def overtaken(self: Collection, as_of: int) -> Any:
            if turns:
                memory.write_down({"status": turns.pop()})
                memory.collection.allow_compaction(memory.upper - 1)
                client.compact()
            return snapshot(self, as_of)

        with persist.open(url, hold=False) as elsewhere:
            monkeypatch.setattr(Collection, "snapshot", overtaken)
            assert notes_in(elsewhere) == {"shop": {"status": 2}}
