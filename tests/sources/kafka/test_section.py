"""Kafka section of a pipeline file: validation without a connection."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from penstock.errors import UsageError
from penstock.pipeline.sections.kafka import KafkaSection, build_kafka_config
from penstock.sources.formats import Registry
from penstock.sources.kafka.config import KafkaConfig
from penstock.sources.kafka.format_spec import FormatSpec


def section(**options: Any) -> KafkaConfig:
    said = {"brokers": "b:9092", "topic": "t", "format": "text", **options}
    said = {name: value for name, value in said.items() if value is not None}
    return build_kafka_config(KafkaSection.model_validate(said))


def columns(**kinds: str) -> dict[str, Any]:
    return {"json": {"columns": kinds}}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"envelope": "upsert", "include": ["key"]},
            'column "key" .* by key_format and by include',
        ),
        (
            {"format": columns(timestamp="text"), "include": ["timestamp"]},
            'column "timestamp" .* by format and by include',
        ),
        ({"include": {"partition": "p", "offset": "p"}}, 'column "p" .* by include and by include'),
        ({"format": columns(_offset="int")}, 'column "_offset" .* by format and by the place'),
        (
            {"envelope": "debezium", "key": ["id"], "format": "json"},
            "needs the columns of the table; name them",
        ),
        ({"envelope": "debezium", "format": columns(id="int")}, "needs the key columns"),
        ({"format": {"avro": {}}}, "neither a schema nor a registry"),
        ({"format": columns(a="varchar")}, "a type that does not exist"),
        ({"key": ["nope"]}, 'key column "nope" does not exist'),
        ({"start": 5}, "as 2026-01-31T12:00:00Z"),
        ({"start": "5"}, "as 2026-01-31T12:00:00Z"),
        ({"brokers": ""}, "empty broker name"),
        ({"brokers": ["b:9092", ""]}, "empty broker name"),
        ({"topic": "bad name"}, 'topic name "bad name" is invalid'),
        ({"topic": ".."}, "topic name"),
        ({"topic": "x" * 250}, "topic name"),
        ({"topic": None, "topics": ["a", "b/c"]}, 'topic name "b/c" is invalid'),
        (
            {
                "topic": None,
                "topics": ["a", "b"],
                "envelope": "debezium",
                "format": columns(id="int"),
                "key": {"a": ["id"], "b": ["no"]},
            },
            'key column "no" does not exist',
        ),
        ({"tls": {"certificate": "our.pem"}}, "only one of certificate and key"),
        ({"tls": {"key": "key.pem"}}, "only one of certificate and key"),
    ],
)
def test_kafka_section_with_invalid_options_is_rejected_at_load(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises((ValueError, ValidationError), match=message):
        section(**options)


def test_kafka_section_that_needs_connection_to_check_is_accepted_at_load(tmp_path: Path) -> None:
    (tmp_path / "x.pem").touch()
    pem = str(tmp_path / "x.pem")
    section(format={"json": {"columns": "infer"}}, key=["unknown yet"])
    section(format={"avro": {"registry": {"url": "http://r:8081"}}}, include=["key"])
    section(tls={"certificate": pem, "key": pem}, start="2026-01-31T12:00:00Z", topic="a.B_c-9")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (FormatSpec("avro", registry=Registry("http://r:8081")), "started without a registry"),
        (FormatSpec("json", columns="infer"), "started without inferred columns"),
    ],
)
def test_format_choice_missing_at_source_creation_raises_usage_error(
    spec: FormatSpec, message: str
) -> None:
    with pytest.raises(UsageError, match=message) as error:
        spec.build(None)
    assert "drop the source and start it again" in error.value.hint
