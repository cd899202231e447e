import sys
from importlib.metadata import EntryPoint
from typing import Any

import pytest

from penstock.data.remap_form import POSTGRES
from penstock.errors import UsageError
from penstock.sources import registry
from penstock.sources.registry import SourceKind, remap_form, source_kind, source_kinds
from penstock.sources.source import Source


def reject_build(*_: object) -> Source:
    raise AssertionError("a source was built")


FOLDER = SourceKind(
    name="folder",
    summary="A folder.",
    build=reject_build,
    remap_forms={},
)
OTHER_KAFKA = SourceKind(
    name="kafka",
    summary="Kafka.",
    build=reject_build,
    remap_forms={},
)
NO_KIND = "a text"


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Any:
    def install(name: str, attribute: str) -> None:
        point = EntryPoint(name, f"kinds:{attribute}", registry.ENTRY_POINTS)
        monkeypatch.setitem(sys.modules, "kinds", sys.modules[__name__])
        monkeypatch.setattr(registry, "entry_points", lambda group: [point])
        source_kinds.cache_clear()

    yield install
    monkeypatch.undo()
    source_kinds.cache_clear()


def test_source_kinds_are_the_built_in_ones():
    assert [*source_kinds()] == ["postgres", "kafka"]
    assert source_kind("kafka").name == "kafka"
    with pytest.raises(UsageError, match='source kind "folder" does not exist'):
        source_kind("folder")


def test_remap_form_of_kind_without_remap_raises_usage_error():
    assert remap_form("postgres") is POSTGRES
    assert remap_form("kafka-topics").name == "kafka-topics"
    with pytest.raises(UsageError, match='"webhook" has no remap'):
        remap_form("webhook")


def test_entry_point_adds_a_kind(install: Any):
    install("folder", "FOLDER")
    assert source_kind("folder") is FOLDER


@pytest.mark.parametrize(
    ("name", "attribute", "message"),
    [
        ("kafka", "OTHER_KAFKA", 'source kind "kafka" is defined twice'),
        ("folder", "MISSING", 'source kind "folder" could not be loaded'),
        ("folder", "NO_KIND", 'entry point "folder" of group "penstock.sources" is not a'),
        ("other", "FOLDER", 'entry point "other" of group "penstock.sources" is not a'),
    ],
)
def test_invalid_entry_point_raises_usage_error(
    install: Any, name: str, attribute: str, message: str
):
    install(name, attribute)
    with pytest.raises(UsageError, match=message):
        source_kinds()
