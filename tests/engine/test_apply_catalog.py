"""Catalog updates of running tasks."""

import threading
from typing import Any

import pytest

from penstock.catalog.objects import known_objects, remove_object
from penstock.clock import SYSTEM_CLOCK
from penstock.engine import apply
from penstock.errors import UsageError
from penstock.pipeline import Pipeline
from penstock.supervisor import Supervisor, Task

SECTION = {"postgres": {"url": "postgresql://nobody@127.0.0.1:1/none"}}


NO_CLIENT: Any = None  # `build_nothing` does not use it.


def build_nothing(_client: Any) -> Any:
    return None


def test_dropped_object_leaves_catalog_after_lock_is_free(tmp_path, monkeypatch):
    lake = f"file:{tmp_path}/lake"
    written = {"location": lake, "sources": {"shop": SECTION, "till": SECTION}}
    catalog = apply._CatalogUpdates(Pipeline.model_validate(written), written, SYSTEM_CLOCK)
    tasks = [
        Task(name, "source", f"{lake}/{name}", "w", build_nothing, lambda _client, _keep: None)
        for name in ("shop", "till")
    ]
    for task in tasks:
        catalog.with_catalog(task).build(NO_CLIENT)
    forget, failures = remove_object, ["first", "second"]

    def locked(*given, **named):
        if failures:
            raise UsageError(f"the catalog is locked, for the {failures.pop(0)} time")
        return forget(*given, **named)

    monkeypatch.setattr(apply, "remove_object", locked)
    task = tasks[0]
    with pytest.raises(UsageError, match="for the first time"):
        catalog.forget(task)
    idle = Supervisor([])
    ended = threading.Event()
    ended.set()
    catalog.follow(ended, idle)
    names = ["shop", "shop_remap", "shop_progress", "till", "till_remap", "till_progress"]
    assert [entry.name for entry in known_objects(lake)] == names
    catalog.follow(ended, idle)
    assert [entry.name for entry in known_objects(lake)] == names[3:]
