"""Broker that accepts connections and never responds."""

import socket
import threading

import pytest

from penstock.errors import TransientError
from penstock.sources.kafka.chosen import Chosen
from penstock.sources.kafka.config import KafkaConfig
from penstock.sources.kafka.upstream import Upstream


def test_stop_event_ends_wait_for_hung_broker() -> None:
    with socket.create_server(("127.0.0.1", 0)) as hung:
        config = KafkaConfig(f"127.0.0.1:{hung.getsockname()[1]}", "clicks", Chosen("text"))
        upstream = Upstream(config)
        upstream.stop = threading.Event()
        upstream.open()
        upstream.stop.set()
        with pytest.raises(TransientError, match="stopped while waiting for"):
            upstream.topic()
        upstream.close()
