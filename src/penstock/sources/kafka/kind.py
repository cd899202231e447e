"""The kind of Kafka sources."""

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, Final

from penstock.clock import Clock
from penstock.data.remap_form import KAFKA, KAFKA_TOPICS
from penstock.sources.kafka.client_properties import is_harmless
from penstock.sources.kind import PropertyTest, SourceKind
from penstock.sources.source import Source

if TYPE_CHECKING:
    from penstock.sources.kafka.config import KafkaConfig

__all__ = ["KAFKA_KIND"]

_PROPERTIES: Final = frozenset({"properties", "reader_properties"})


def _build(name: str, config: "KafkaConfig", location: str, clock: Clock) -> Source:
    # Imported here: it loads a compiler, which readers do not need.
    from penstock.sources.kafka.source import KafkaSource

    return KafkaSource(name, config, clock=clock)


def _describe(section: Mapping[str, Any]) -> str:
    topics = section.get("topics") or [section.get("topic")]
    return ", ".join(map(str, topics))


def _data_collections(name: str, config: "KafkaConfig") -> list[str]:
    return [f"{name}.{topic}" for topic in config.topics] or [name]


def _collections(name: str, config: "KafkaConfig") -> Collection[str]:
    return [*_data_collections(name, config), _errors(name)]


def _extra_collections(name: str, config: "KafkaConfig") -> Collection[str]:
    return [_errors(name)] if config.on_bad_record == "set_aside" else []


def _append_only(name: str, config: "KafkaConfig") -> Collection[str]:
    data = [name, *_data_collections(name, config)] if config.envelope == "none" else []
    return [*data, _errors(name)]


def _errors(name: str) -> str:
    return f"{name}_errors"


def _harmless_properties(section: Mapping[Any, Any], key: str) -> PropertyTest | None:
    is_kafka = isinstance(section.get("brokers"), str | list)
    return is_harmless if is_kafka and key in _PROPERTIES else None


KAFKA_KIND: Final = SourceKind(
    name="kafka",
    summary="Kafka topics.",
    build=_build,
    remap_forms={"kafka": KAFKA, "kafka-topics": KAFKA_TOPICS},
    describe=_describe,
    collections=_collections,
    extra_collections=_extra_collections,
    append_only=_append_only,
    harmless_properties=_harmless_properties,
    spark_format="kafka",
)
