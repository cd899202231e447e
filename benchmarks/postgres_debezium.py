"""Debezium, embedded, for the benchmark and for the scoreboard; runs in `.venv-debezium`.

    echo '{"how": "count", …}' | .venv-debezium/bin/python benchmarks/postgres_debezium.py

The engine's own settings are left as they are. To count, its consumer is one
that does nothing: it gets records as the connector made them, not turned into
JSON, and one call a batch crosses into Python. To look at values they are
turned into JSON, as whoever uses it from Python or over HTTP gets them.

The answer goes to the file named in the request, since Debezium logs to standard
output. Time is counted from when a quarter of the records has come, so neither
starting nor connecting is in it, nor the time in which Java compiles itself.
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


class Counting:
    """A consumer that does nothing but count."""

    def __init__(self, wanted: int) -> None:
        self.wanted = wanted
        self.seen = self.first = 0
        self.first_s = self.last_s = 0.0
        self.done = threading.Event()

    def take(self, records: Any, committer: Any) -> None:
        self.last_s = time.perf_counter()
        count = int(records.size())
        self.seen += count
        if not self.first and self.seen >= self.wanted // 4:
            self.first, self.first_s = self.seen, self.last_s
        if count:
            # The last one's place in the stream is that of all before it.
            committer.markProcessed(records.get(count - 1))
        committer.markBatchFinished()
        if self.seen >= self.wanted:
            self.done.set()

    def answer(self) -> Mapping[str, Any]:
        rows, seconds = self.seen - self.first, self.last_s - self.first_s
        return {"seen": self.seen, "rows": rows, "seconds": seconds}


class Keeping:
    """A consumer that keeps every record, as JSON."""

    def __init__(self, wanted: int) -> None:
        self.wanted = wanted
        self.kept: list[Any] = []
        self.done = threading.Event()

    def take(self, records: Any, committer: Any) -> None:
        for at in range(int(records.size())):
            record = records.get(at)
            if record.value() is not None:
                self.kept.append(json.loads(str(record.value())))
            committer.markProcessed(record)
        committer.markBatchFinished()
        if len(self.kept) >= self.wanted:
            self.done.set()

    def answer(self) -> Mapping[str, Any]:
        return {"records": self.kept}


def main(request: Mapping[str, Any]) -> None:
    """Run the engine until it has given as many records as are wanted, or has ended."""
    ensure_jvm_started(jvm_path=request["jvm"])
    counting = request["how"] == "count"
    consumer = Counting(request["wanted"]) if counting else Keeping(request["wanted"])
    form = "io.debezium.embedded.Connect" if counting else "io.debezium.engine.format.Json"
    failures: list[str] = []
    engine = _engine(consumer, form, request["properties"], failures)
    runs = threading.Thread(target=engine.run)
    runs.start()
    consumer.done.wait(request["patience_s"])
    with contextlib.suppress(jpype.JException):  # It may have ended by itself.
        engine.close()
    runs.join()
    answer = {**consumer.answer(), "failures": failures}
    Path(request["answer"]).write_text(json.dumps(answer))


def _engine(consumer: Any, form: str, properties: Mapping[str, str], failures: list[str]) -> Any:
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

    given = jpype.JClass("java.util.Properties")()
    for name, value in properties.items():
        given.setProperty(name, str(value))
    builder = jpype.JClass("io.debezium.engine.DebeziumEngine").create(jpype.JClass(form))
    return builder.using(given).using(Completion()).notifying(Consumer()).build()


if __name__ == "__main__":
    main(json.load(sys.stdin))
