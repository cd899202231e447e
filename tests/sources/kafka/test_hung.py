"""Broker that accepts connections and never responds."""

import socket
import threading

import pytest

from penstock.errors import TransientError
from penstock.sources.kafka.cluster import Cluster
from penstock.sources.kafka.config import KafkaConfig
from penstock.sources.kafka.format_spec import FormatSpec


def test_stop_event_ends_wait_for_hung_broker() -> None:
    with socket.create_server(("127.0.0.1", 0)) as hung:
        config = KafkaConfig(f"127.0.0.1:{hung.getsockname()[1]}", "clicks", FormatSpec("text"))
        upstream = Cluster(config)
        upstream.stop = threading.Event()
        upstream.open()
        upstream.stop.set()
        with pytest.raises(TransientError, match="stopped while waiting for"):
            upstream.topic()
        upstream.close()
