"""Kafka section of a pipeline file: validation without a connection."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from penstock.errors import UsageError
from penstock.pipeline.kafka import KafkaSection, build_kafka_config
from penstock.sources.formats import Registry
from penstock.sources.kafka.chosen import Chosen
from penstock.sources.kafka.config import KafkaConfig


def section(**options: Any) -> KafkaConfig:
    said = {"brokers": "b:9092", "topic": "t", "format": "text", **options}
    said = {name: value for name, value in said.items() if value is not None}
    return build_kafka_config(KafkaSection.model_validate(said))


def columns(**kinds: str) -> dict[str, Any]:
    return {"json": {"columns": kinds}}


@pytest.mark.parametrize(
    ("options", "told"),
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
            "needs to know the columns of the table; name them",
        ),
        ({"envelope": "debezium", "format": columns(id="int")}, "the key of the rows"),
        ({"format": {"avro": {}}}, "neither a schema nor a registry"),
        ({"format": columns(a="varchar")}, "a type that does not exist"),
        ({"key": ["nope"]}, 'no column "nope" for the key'),
        ({"start": 5}, "as 2026-01-31T12:00:00Z"),
        ({"start": "5"}, "as 2026-01-31T12:00:00Z"),
        ({"brokers": ""}, "brokers of a kafka source are not named"),
        ({"brokers": ["b:9092", ""]}, "brokers of a kafka source are not named"),
        ({"topic": "bad name"}, 'no topic can be called "bad name"'),
        ({"topic": ".."}, "no topic can be called"),
        ({"topic": "x" * 250}, "no topic can be called"),
        ({"topic": None, "topics": ["a", "b/c"]}, 'no topic can be called "b/c"'),
        (
            {
                "topic": None,
                "topics": ["a", "b"],
                "envelope": "debezium",
                "format": columns(id="int"),
                "key": {"a": ["id"], "b": ["no"]},
            },
            'no column "no" for the key',
        ),
        ({"tls": {"certificate": "our.pem"}}, "a certificate is shown with its key"),
        ({"tls": {"key": "key.pem"}}, "a certificate is shown with its key"),
    ],
)
def test_kafka_section_with_invalid_options_is_rejected_at_load(
    options: dict[str, Any], told: str
) -> None:
    with pytest.raises((ValueError, ValidationError), match=told):
        section(**options)


def test_kafka_section_that_needs_connection_to_check_is_accepted_at_load(tmp_path: Path) -> None:
    (tmp_path / "x.pem").touch()
    pem = str(tmp_path / "x.pem")
    section(format={"json": {"columns": "infer"}}, key=["unknown yet"])
    section(format={"avro": {"registry": {"url": "http://r:8081"}}}, include=["key"])
    section(tls={"certificate": pem, "key": pem}, start="2026-01-31T12:00:00Z", topic="a.B_c-9")


@pytest.mark.parametrize(
    ("chosen", "told"),
    [
        (Chosen("avro", registry=Registry("http://r:8081")), "began without a registry"),
        (Chosen("json", columns="infer"), "began without columns that are inferred"),
    ],
)
def test_format_choice_missing_at_source_creation_raises_usage_error(
    chosen: Chosen, told: str
) -> None:
    with pytest.raises(UsageError, match=told) as error:
        chosen.made(None)
    assert "drop it and let it begin again" in error.value.hint
