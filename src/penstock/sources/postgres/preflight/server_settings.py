"""Settings of the server, and privileges of the role, that replication needs."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Self

from penstock.errors import Problem
from penstock.pgclient import Connection
from penstock.sources.postgres.names import identifier
from penstock.sources.postgres.slots import inspect_slot

__all__ = ["ServerSettings"]

SENDERS: Final = 2
"""WAL senders needed: one for the stream and one for the connection that creates a slot."""

SERVICES: Final = {
    "rds_superuser": "rds",
    "cloudsqlsuperuser": "cloudsql",
    "azure_pg_admin": "azure",
}
"""Managed services, by a role that only they have."""


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Settings of a server, and privileges of the connected role."""

    standby: bool
    role: str
    may_replicate: bool
    wal_level: str
    max_slots: int
    slots: int
    idle_slots: tuple[str, ...]
    slots_needed: int
    max_senders: int
    senders: int
    service: str
    """Managed service that decides how to change settings: `rds`, `cloudsql`, `azure` or empty."""

    @classmethod
    def read(cls, connection: Connection, slot: str | None) -> Self:
        """Return the settings; `slot` is the existing slot of the source, if it has one."""
        row = connection.query(
            """
            SELECT pg_catalog.pg_is_in_recovery(), r.rolname, r.rolsuper,
              r.rolreplication OR coalesce((
                SELECT pg_catalog.pg_has_role(s.oid, 'USAGE') FROM pg_catalog.pg_roles s
                WHERE s.rolname = 'rds_replication'), false),
              pg_catalog.current_setting('wal_level'),
              pg_catalog.current_setting('max_replication_slots'),
              (SELECT count(*) FROM pg_catalog.pg_replication_slots),
              pg_catalog.current_setting('max_wal_senders'),
              (SELECT count(*) FROM pg_catalog.pg_stat_get_wal_senders()),
              (SELECT min(s.rolname) FROM pg_catalog.pg_roles s WHERE s.rolname IN
                ('rds_superuser', 'cloudsqlsuperuser', 'azure_pg_admin'))
            FROM pg_catalog.pg_roles r WHERE r.rolname = current_user
            """
        )[0]
        standby, role, superuser, replicates, wal_level, *counts = (text or "" for text in row)
        max_slots, slots, max_senders, senders, service_role = counts
        idle_slots = connection.query(
            "SELECT slot_name FROM pg_catalog.pg_replication_slots WHERE NOT active ORDER BY 1"
        )
        state = None if slot is None else inspect_slot(connection, slot)
        return cls(
            standby=standby == "t",
            role=role,
            may_replicate=superuser == "t" or replicates == "t",
            wal_level=wal_level,
            max_slots=int(max_slots),
            slots=int(slots),
            idle_slots=tuple(str(name) for (name,) in idle_slots),
            # One permanent slot, unless it exists already, and one temporary slot for resync.
            slots_needed=2 if state is None else 1,
            max_senders=int(max_senders),
            # A process that holds the source's slot is an earlier stream of this source, and will
            # be terminated.
            senders=int(senders) - (state is not None and state.active_pid is not None),
            service=SERVICES.get(service_role, ""),
        )

    def problems(self) -> Iterator[Problem]:
        """Yield settings and privileges that prevent replication."""
        if self.standby:
            yield Problem(
                "the server is a standby",
                detail="A standby applies the WAL of another server and writes none to replicate.",
                hint="Connect to the primary.",
            )
        if self.wal_level != "logical":
            yield Problem(
                f"wal_level is {self.wal_level}, and must be logical", hint=self._wal_level_hint()
            )
        free_slots = self.max_slots - self.slots
        if free_slots < self.slots_needed:
            idle = f" These slots have no reader: {', '.join(self.idle_slots)}."
            yield Problem(
                f"of {self.max_slots} replication slots {free_slots} are free, and "
                f"{self.slots_needed} are needed",
                detail="One slot is for the stream, and one temporary slot is for comparing "
                f"tables.{idle if self.idle_slots else ''}",
                hint=self._setting_hint("max_replication_slots", self.slots + self.slots_needed),
            )
        free_senders = max(0, self.max_senders - self.senders)
        if free_senders < SENDERS:
            yield Problem(
                f"of {self.max_senders} WAL senders {free_senders} are free, and {SENDERS} are "
                "needed",
                hint=self._setting_hint("max_wal_senders", self.senders + SENDERS),
            )
        if not self.may_replicate:
            role = identifier(self.role)
            statement = (
                f"GRANT rds_replication TO {role};"
                if self.service == "rds"
                else f"ALTER ROLE {role} REPLICATION;"
            )
            yield Problem(f'role "{self.role}" may not replicate', hint=f"Run: {statement}")

    def _wal_level_hint(self) -> str:
        match self.service:
            case "rds":
                return (
                    "Set rds.logical_replication = 1 in the parameter group of the instance and "
                    "reboot it."
                )
            case "cloudsql":
                return (
                    "Set the flag cloudsql.logical_decoding = on of the instance, which restarts "
                    "it."
                )
            case "azure":
                return "Set the server parameter wal_level = logical and restart the server."
            case _:
                return "Run: ALTER SYSTEM SET wal_level = 'logical'; and restart the server."

    def _setting_hint(self, name: str, value: int) -> str:
        if self.service:
            return f"Set {name} = {value} or more in the settings of the service, and restart it."
        return f"Run: ALTER SYSTEM SET {name} = {value}; and restart the server."
