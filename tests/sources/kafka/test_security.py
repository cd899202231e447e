"""Authentication at Kafka brokers, and secrets."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import DefiniteError
from penstock.servers.kafka import KafkaBroker
from penstock.sources.kafka.client_properties import is_harmless
from penstock.sources.kafka.cluster import Cluster
from penstock.sources.kafka.config import KafkaConfig, Sasl, Tls
from penstock.sources.kafka.format_spec import FormatSpec
from tests.fix_kafka import make_broker

SECRET = "n0t-to-be-seen"


@pytest.fixture(scope="module")
def guarded() -> Iterator[KafkaBroker]:
    with make_broker(users={"penstock": SECRET}) as broker:
        broker.create_topic("clicks")
        yield broker


def config(broker: KafkaBroker, password: str, mechanism: Any) -> KafkaConfig:
    return KafkaConfig(
        broker.bootstrap_for("SASL_PLAINTEXT"),
        "clicks",
        FormatSpec("text"),
        sasl=Sasl(mechanism, "penstock", password),
    )


@pytest.mark.parametrize(
    ("name", "value", "harmless"),
    [
        ("retries", "5", True),
        ("api.version.request", "true", True),
        ("fetch.max.bytes", "1048576", True),
        ("ssl.key.password", "12345", False),
        ("sasl.oauthbearer.config", "true", False),
        ("ssl.key.pem", "x", False),
        ("own.class.knows", "something", False),
    ],
)
def test_kafka_property_is_harmless_only_if_known_and_not_secret(
    name: str, value: str, harmless: bool
) -> None:
    assert is_harmless(name, value) is harmless


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"])
def test_kafka_client_with_correct_password_connects(guarded: KafkaBroker, mechanism: str) -> None:
    upstream = Cluster(config(guarded, SECRET, mechanism))
    upstream.open()
    assert upstream.topic().partitions == (0,)


def test_kafka_client_with_wrong_password_raises_definite_error_without_secret(
    guarded: KafkaBroker,
) -> None:
    given = config(guarded, "wr0ng-secret", "SCRAM-SHA-512")
    upstream = Cluster(given)
    upstream.open()
    with pytest.raises(DefiniteError) as told:
        upstream.topic()
    said = f"{told.value} {told.value.detail} {told.value.hint}"
    assert "access to topic" in said
    assert "uthentication failed" in said
    assert "wr0ng-secret" not in said
    assert "wr0ng-secret" not in repr(given)


def test_reader_options_quote_password_for_jaas(guarded: KafkaBroker) -> None:
    given = config(guarded, 'with"and\\', "PLAIN")
    told = given.reader()["kafka.sasl.jaas.config"]
    assert told.endswith(r' password="with\"and\\";')
    assert 'with"and\\' in given.secrets


def test_kafka_config_secrets_include_all_secret_reader_options(tmp_path: Path) -> None:
    (tmp_path / "key.pem").write_text("the key itself")
    (tmp_path / "our.pem").write_text("our certificate")
    given = KafkaConfig(
        "b:9092",
        "clicks",
        FormatSpec("text"),
        tls=Tls(certificate=tmp_path / "our.pem", key=tmp_path / "key.pem"),
        sasl=Sasl("PLAIN", "penstock", 'with"and'),
        properties={"client.id": "seen", "ssl.key.pem": "one", "SSL.KEY.PASSWORD": "two"},
        reader_properties={"own.class.knows": "three", "fetch.max.bytes": "1"},
    )
    assert set(given.secrets) == {
        *("one", "two", "three", 'with"and', r"with\"and", "the key itself"),
    }
    assert given.reader()["kafka.ssl.keystore.key"] in given.secrets
