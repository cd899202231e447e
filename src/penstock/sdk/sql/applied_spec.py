"""The applied specification: table `flow_materializations_v2`.

    materialization │ version  spec

The tables of the endpoint have the columns. The specification adds the selected fields, delta
updates, whether a table was created or adopted, and the version that streams must open.

If a table must be dropped and created again, its binding is stored together with the binding that
the table was created for. The transaction that replaces the table removes the latter.
"""

import base64
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from penstock.protocol.specs import MaterializationBinding, MaterializationSpec
from penstock.protocol.wire import decode, encode
from penstock.sdk.bindings import FieldKind, kind_of
from penstock.sdk.errors import Refused
from penstock.sdk.sql.dialect import Dialect
from penstock.sdk.sql.session import Session

__all__ = [
    "TABLE",
    "LastApplied",
    "check_applied",
    "create_applied",
    "delete",
    "last_applied",
    "put",
    "with_adopted",
    "with_filled",
    "with_previous",
    "without_secrets",
]

TABLE = "flow_materializations_v2"
FILLED = "flow_filled"
"""Key in the stored resource configuration: fields whose columns were added with a default."""

PREVIOUS = "flow_previous"
"""Key in the stored configuration of a resource to drop and create again: the binding that its
table was created for."""


@dataclass(frozen=True, slots=True)
class LastApplied:
    """Applied version and its specification."""

    version: str
    spec: MaterializationSpec

    def binding(self, path: tuple[str, ...]) -> MaterializationBinding | None:
        """Return the binding that the table of a resource was created for, if any."""
        bound = next((entry for entry in self.spec.bindings if entry.resource_path == path), None)
        if bound is None:
            return None
        previous = json.loads(bound.resource_spec_json).get(PREVIOUS)
        if previous is None:
            return bound
        return decode(MaterializationSpec, base64.b64decode(previous)).bindings[0]

    def is_pending(self, path: tuple[str, ...]) -> bool:
        """Return whether the table of a resource must still be dropped and created again."""
        return any(
            binding.resource_path == path and PREVIOUS in json.loads(binding.resource_spec_json)
            for binding in self.spec.bindings
        )

    def recreated(self, path: tuple[str, ...]) -> "LastApplied":
        """Return the record after the table of a resource was dropped and created again."""
        bindings = []
        for binding in self.spec.bindings:
            if binding.resource_path == path:
                resource = json.loads(binding.resource_spec_json)
                resource.pop(PREVIOUS, None)
                binding = replace(binding, resource_spec_json=json.dumps(resource))
            bindings.append(binding)
        return replace(self, spec=replace(self.spec, bindings=tuple(bindings)))

    def kinds(self, path: tuple[str, ...]) -> Mapping[str, FieldKind]:
        """Return the kinds of the selected fields of a resource, by field."""
        if (bound := self.binding(path)) is None:
            return {}
        names = bound.field_selection.fields
        projections = {name: bound.collection.projection(name) for name in names}
        return {
            name: kind_of(projection.inference)
            for name, projection in projections.items()
            if projection is not None
        }

    def delta_updates(self, path: tuple[str, ...]) -> bool | None:
        """Return whether a resource had delta updates; None if it was not bound."""
        bound = self.binding(path)
        return None if bound is None else bound.delta_updates

    def marks_deleted(self, path: tuple[str, ...]) -> bool:
        """Return whether a resource had soft deletes."""
        bound = self.binding(path)
        if bound is None or bound.delta_updates:
            return False
        return bool(json.loads(bound.resource_spec_json).get("delete") == "soft")

    def filled(self, path: tuple[str, ...]) -> frozenset[str]:
        """Return the fields whose columns were added with their default in every row."""
        bound = self.binding(path)
        if bound is None:
            return frozenset()
        return frozenset(json.loads(bound.resource_spec_json).get(FILLED, ()))

    def is_adopted(self, path: tuple[str, ...]) -> bool:
        """Return whether the table of a resource was adopted."""
        bound = self.binding(path)
        return bound is not None and bool(json.loads(bound.resource_spec_json).get("adopt"))


def create_applied(dialect: Dialect, path: tuple[str, ...]) -> str:
    """Return the statement that creates the table."""
    return (
        f"CREATE TABLE IF NOT EXISTS {dialect.quoted_path(path)} (\n"
        "    materialization TEXT NOT NULL PRIMARY KEY,\n"
        "    version TEXT NOT NULL,\n"
        "    spec TEXT NOT NULL\n"
        ")"
    )


def last_applied(
    session: Session, dialect: Dialect, path: tuple[str, ...], materialization: str
) -> LastApplied | None:
    """Return the applied specification; None if nothing was applied."""
    rows = session.query(
        f"SELECT version, spec FROM {dialect.quoted_path(path)} WHERE materialization = ?",
        [materialization],
    )
    if not rows:
        return None
    version, spec = rows[0]
    return LastApplied(version, decode(MaterializationSpec, base64.b64decode(spec)))


def put(
    session: Session,
    dialect: Dialect,
    path: tuple[str, ...],
    spec: MaterializationSpec,
    version: str,
) -> None:
    """Store the applied specification."""
    table, name = dialect.quoted_path(path), spec.materialization
    stored = base64.b64encode(encode(without_secrets(spec))).decode()
    if not session.run(
        f"UPDATE {table} SET version = ?, spec = ? WHERE materialization = ?",
        [version, stored, name],
    ):
        session.run(
            f"INSERT INTO {table} (materialization, version, spec) VALUES (?, ?, ?)",
            [name, version, stored],
        )


def without_secrets(spec: MaterializationSpec) -> MaterializationSpec:
    """Return the specification without the endpoint configuration, which may have secrets."""
    return replace(spec, endpoint_spec_json="{}")


def with_adopted(
    spec: MaterializationSpec, adopted: Collection[tuple[str, ...]]
) -> MaterializationSpec:
    """Return the specification with `adopt` set for exactly the tables that were adopted."""
    bindings = []
    for binding in spec.bindings:
        resource = json.loads(binding.resource_spec_json)
        if bool(resource.get("adopt")) != (binding.resource_path in adopted):
            resource["adopt"] = binding.resource_path in adopted
            binding = replace(binding, resource_spec_json=json.dumps(resource))
        bindings.append(binding)
    return replace(spec, bindings=tuple(bindings))


def with_filled(
    spec: MaterializationSpec, filled: Mapping[tuple[str, ...], Collection[str]]
) -> MaterializationSpec:
    """Record, by path, the fields whose columns were added with their default in every row."""
    bindings = []
    for binding in spec.bindings:
        if names := sorted(filled.get(binding.resource_path, ())):
            resource = {**json.loads(binding.resource_spec_json), FILLED: names}
            binding = replace(binding, resource_spec_json=json.dumps(resource))
        bindings.append(binding)
    return replace(spec, bindings=tuple(bindings))


def with_previous(
    spec: MaterializationSpec, previous: Mapping[tuple[str, ...], MaterializationBinding]
) -> MaterializationSpec:
    """Record, by path, the bindings of tables that are to be dropped and created again."""
    bindings = []
    for binding in spec.bindings:
        if (before := previous.get(binding.resource_path)) is not None:
            stored = encode(MaterializationSpec(spec.materialization, "{}", (before,)))
            resource = json.loads(binding.resource_spec_json)
            resource[PREVIOUS] = base64.b64encode(stored).decode()
            binding = replace(binding, resource_spec_json=json.dumps(resource))
        bindings.append(binding)
    return replace(spec, bindings=tuple(bindings))


def delete(session: Session, dialect: Dialect, path: tuple[str, ...], materialization: str) -> None:
    """Delete the applied specification."""
    session.run(
        f"DELETE FROM {dialect.quoted_path(path)} WHERE materialization = ?", [materialization]
    )


def check_applied(last: LastApplied | None, materialization: str, version: str) -> None:
    """Check that this version is applied.

    Raises:
        Refused: nothing or another version is applied.
    """
    if last is None:
        raise Refused(
            f'materialization "{materialization}" has not been applied',
            hint="Apply the materialization first.",
        )
    if last.version != version:
        raise Refused(
            f'materialization "{materialization}" was applied as version "{last.version}", '
            f'not as version "{version}"',
            hint="Apply this version first.",
        )
