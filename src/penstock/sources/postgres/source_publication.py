"""Publication of one source: its tables, and its removal.

Penstock alters and drops only publications that it created, which their comments record. A slot of
another source may still need a published table, so tables and publications are removed only if no
other slot of Penstock exists in the database.
"""

from collections.abc import Collection, Sequence

from penstock.pgclient import Connection
from penstock.sources.postgres.catalog import find_oids, published_tables
from penstock.sources.postgres.config import PostgresConfig
from penstock.sources.postgres.names import TableName, identifier
from penstock.sources.postgres.publication import (
    Creator,
    alter_publication,
    find_publication,
    may_drop,
    read_creator,
)
from penstock.sources.postgres.slots import list_slots
from penstock.telemetry import fields, logger

__all__ = ["SourcePublication"]

log = logger("sources.postgres")


class SourcePublication:
    """Publication that a source reads."""

    def __init__(self, source: str, config: PostgresConfig, location: str) -> None:
        """Describe the publication of `source` in the lake at the normalized URL `location`."""
        self._source = source
        self._config = config
        self._name = config.publication
        self.creator = Creator.of(source, location)

    def is_created_by_source(self, connection: Connection) -> bool:
        """Return whether Penstock created the publication for this source."""
        creator = read_creator(connection, self._name)
        return creator is not None and creator.matches(self.creator)

    def add_configured_tables(self, connection: Connection) -> None:
        """Add the tables that the file names, if the publication was created for this source."""
        if not self._may_alter(connection):
            return
        configured = {spec.name for spec in self._config.tables or ()}
        for name in sorted(configured - _table_names(connection, self._name), key=str):
            if find_oids(connection, [name]):
                alter_publication(connection, self._name, "ADD", name)

    def remove_tables(
        self, connection: Connection, names: Sequence[TableName], *, slots: Collection[str]
    ) -> None:
        """Remove tables, unless other slots of Penstock may need them.

        `slots` are the slots of this source.
        """
        if not self._may_alter(connection):
            return
        if other_slots := _other_slots(connection, slots):
            self._warn("removed tables stay published; other slots may need them", other_slots)
            return
        for name in sorted({*names} & _table_names(connection, self._name), key=str):
            alter_publication(connection, self._name, "DROP", name)

    def drop(self, connection: Connection) -> None:
        """Drop the publication, if Penstock created it and no slot of Penstock remains.

        Another source may have created it: the last source to be dropped removes it.
        """
        if read_creator(connection, self._name) is None:
            return
        if other_slots := _other_slots(connection, ()):
            self._warn("publication not dropped; other slots may need it", other_slots)
        elif not self.is_created_by_source(connection) and not may_drop(connection, self._name):
            self._warn("publication not dropped; another role owns it", ())
        else:
            connection.execute(f"DROP PUBLICATION {identifier(self._name)}")

    def _may_alter(self, connection: Connection) -> bool:
        """Return whether this source created the publication and it lists tables by name."""
        publication = find_publication(connection, self._name)
        return (
            publication is not None
            and not publication.all_tables
            and self.is_created_by_source(connection)
        )

    def _warn(self, event: str, slots: Sequence[str]) -> None:
        log.warning(
            event,
            extra=fields(source=self._source, publication=self._name, slots=",".join(slots)),
        )


def _table_names(connection: Connection, publication: str) -> set[TableName]:
    return {table.table_name for table in published_tables(connection, publication)}


def _other_slots(connection: Connection, known: Collection[str]) -> list[str]:
    return [slot.name for slot in list_slots(connection) if slot.name not in known]
