"""Topic of a real broker, and a lake that ingests it through Spark."""

import threading
from pathlib import Path
from typing import Any

import yaml

import penstock.ingest
from penstock import persist
from penstock.engine.shared_session.spark import SharedSession
from penstock.errors import UsageError
from penstock.servers.kafka import KafkaBroker
from tests.sources.kafka.clients import consume


class Topic:
    """Topic and the lake that ingests it."""

    def __init__(
        self, broker: KafkaBroker, name: str, folder: Path, session: SharedSession, **options: Any
    ) -> None:
        self.broker, self.name, self.folder, self.session = broker, name, folder, session
        self.options: dict[str, Any] = {"format": "text", **options}

    @property
    def storage(self) -> str:
        return f"file:{self.folder}/lake/clicks"

    def once(self, **options: Any) -> None:
        """Ingest everything that the topic has now."""
        file = self.write_file(**options)
        penstock.ingest.run(file, once=True, stop=threading.Event(), jobs=self.session)

    def write_file(self, **options: Any) -> Path:
        """Write the pipeline file."""
        section = {
            "brokers": self.broker.bootstrap,
            "topic": self.name,
            **self.options,
            **options,
        }
        section = {name: value for name, value in section.items() if value is not None}
        file = self.folder / "pipeline.yaml"
        file.write_text(
            yaml.safe_dump(
                {
                    "location": f"file:{self.folder}/lake",
                    "tick": "50ms",
                    "sources": {"clicks": {"kafka": section}},
                }
            )
        )
        return file

    def rows(self, collection: str = "clicks") -> list[dict[str, Any]]:
        with persist.open(self.storage, hold=False) as client:
            found = client.collection(collection)
            return found.snapshot(found.upper - 1).arrow().to_pylist()

    def has_rows(self) -> bool:
        try:
            return bool(self.rows())
        except UsageError:
            return False

    def seen(self) -> list[tuple[int, int, str]]:
        """Return the rows in the lake: partition, offset and text."""
        return sorted((row["_partition"], row["_offset"], row["text"]) for row in self.rows())

    def committed(self) -> list[tuple[int, int, str]]:
        """Return the records that a read_committed consumer reads from the topic."""
        return [
            (record.partition, record.offset, (record.value or b"").decode())
            for record in consume(self.broker, self.name)
        ]
