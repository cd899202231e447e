"""What was applied last: table `flow_materializations_v2`.

    materialization │ version  spec

The endpoint's tables say which columns there are; this says which of them were
selected, whether a binding took delta updates, whether its table was made or taken
over, and which version a stream must be opened with.

A binding whose table is yet to be dropped and created again is recorded with the binding
that the table was made for. The transaction that replaces the table removes that.
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
    "create_applied",
    "forget",
    "last_applied",
    "must_be_applied",
    "remember",
    "with_filled",
    "with_previous",
    "with_takeovers",
    "without_secrets",
]

TABLE = "flow_materializations_v2"
FILLED = "flow_filled"
"""In the stored configuration of a resource: its fields that were filled when added."""

PREVIOUS = "flow_previous"
"""In the stored configuration of a resource that is to be dropped and created again: the
binding that its table was made for."""


@dataclass(frozen=True, slots=True)
class LastApplied:
    """A version, and what it is."""

    version: str
    spec: MaterializationSpec

    def binding(self, path: tuple[str, ...]) -> MaterializationBinding | None:
        """Return the binding that the table of a resource was made for, if any."""
        bound = next((each for each in self.spec.bindings if each.resource_path == path), None)
        if bound is None:
            return None
        previous = json.loads(bound.resource_spec_json).get(PREVIOUS)
        if previous is None:
            return bound
        return decode(MaterializationSpec, base64.b64decode(previous)).bindings[0]

    def is_pending(self, path: tuple[str, ...]) -> bool:
        """Return whether the table of a resource is yet to be dropped and created again."""
        return any(
            each.resource_path == path and PREVIOUS in json.loads(each.resource_spec_json)
            for each in self.spec.bindings
        )

    def recreated(self, path: tuple[str, ...]) -> "LastApplied":
        """Return the record once the table of a resource was dropped and created again."""
        bindings = []
        for each in self.spec.bindings:
            if each.resource_path == path:
                resource = json.loads(each.resource_spec_json)
                resource.pop(PREVIOUS, None)
                each = replace(each, resource_spec_json=json.dumps(resource))
            bindings.append(each)
        return replace(self, spec=replace(self.spec, bindings=tuple(bindings)))

    def kinds(self, path: tuple[str, ...]) -> Mapping[str, FieldKind]:
        """By field that was selected for a resource: what its values were."""
        if (bound := self.binding(path)) is None:
            return {}
        found = {name: bound.collection.projection(name) for name in bound.field_selection.fields}
        return {name: kind_of(each.inference) for name, each in found.items() if each is not None}

    def delta_updates(self, path: tuple[str, ...]) -> bool | None:
        """Whether a resource took delta updates; none, if it was not bound."""
        bound = self.binding(path)
        return None if bound is None else bound.delta_updates

    def marks_deleted(self, path: tuple[str, ...]) -> bool:
        """Whether rows of a resource were only marked when they were deleted."""
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

    def taken_over(self, path: tuple[str, ...]) -> bool:
        """Whether the table of a resource was somebody else's."""
        bound = self.binding(path)
        return bound is not None and bool(json.loads(bound.resource_spec_json).get("adopt"))


def create_applied(dialect: Dialect, path: tuple[str, ...]) -> str:
    """Make the table, if it is not there."""
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
    """What was applied last, if anything."""
    found = session.query(
        f"SELECT version, spec FROM {dialect.quoted_path(path)} WHERE materialization = ?",
        [materialization],
    )
    if not found:
        return None
    version, spec = found[0]
    return LastApplied(version, decode(MaterializationSpec, base64.b64decode(spec)))


def remember(
    session: Session,
    dialect: Dialect,
    path: tuple[str, ...],
    spec: MaterializationSpec,
    version: str,
) -> None:
    """Keep what is applied now."""
    table, name = dialect.quoted_path(path), spec.materialization
    kept = base64.b64encode(encode(without_secrets(spec))).decode()
    if not session.run(
        f"UPDATE {table} SET version = ?, spec = ? WHERE materialization = ?",
        [version, kept, name],
    ):
        session.run(
            f"INSERT INTO {table} (materialization, version, spec) VALUES (?, ?, ?)",
            [name, version, kept],
        )


def without_secrets(spec: MaterializationSpec) -> MaterializationSpec:
    """What is kept of it: not how to connect, which may hold secrets."""
    return replace(spec, endpoint_spec_json="{}")


def with_takeovers(
    spec: MaterializationSpec, taken: Collection[tuple[str, ...]]
) -> MaterializationSpec:
    """What is kept of it: by `adopt`, which tables were taken over, whatever is said of it now."""
    bindings = []
    for each in spec.bindings:
        resource = json.loads(each.resource_spec_json)
        if bool(resource.get("adopt")) != (each.resource_path in taken):
            resource["adopt"] = each.resource_path in taken
            each = replace(each, resource_spec_json=json.dumps(resource))
        bindings.append(each)
    return replace(spec, bindings=tuple(bindings))


def with_filled(
    spec: MaterializationSpec, filled: Mapping[tuple[str, ...], Collection[str]]
) -> MaterializationSpec:
    """Record, by path, the fields whose columns were added with their default in every row."""
    bindings = []
    for each in spec.bindings:
        if names := sorted(filled.get(each.resource_path, ())):
            resource = {**json.loads(each.resource_spec_json), FILLED: names}
            each = replace(each, resource_spec_json=json.dumps(resource))
        bindings.append(each)
    return replace(spec, bindings=tuple(bindings))


def with_previous(
    spec: MaterializationSpec, previous: Mapping[tuple[str, ...], MaterializationBinding]
) -> MaterializationSpec:
    """Record, by path, the bindings of tables that are to be dropped and created again."""
    bindings = []
    for each in spec.bindings:
        if (before := previous.get(each.resource_path)) is not None:
            stored = encode(MaterializationSpec(spec.materialization, "{}", (before,)))
            resource = json.loads(each.resource_spec_json)
            resource[PREVIOUS] = base64.b64encode(stored).decode()
            each = replace(each, resource_spec_json=json.dumps(resource))
        bindings.append(each)
    return replace(spec, bindings=tuple(bindings))


def forget(session: Session, dialect: Dialect, path: tuple[str, ...], materialization: str) -> None:
    """Nothing is applied any more."""
    session.run(
        f"DELETE FROM {dialect.quoted_path(path)} WHERE materialization = ?", [materialization]
    )


def must_be_applied(last: LastApplied | None, materialization: str, version: str) -> None:
    """Refuse what was not applied, or is not what was.

    Raises:
        Refused: so it is.
    """
    if last is None:
        raise Refused(
            f'materialization "{materialization}" has not been applied',
            hint="Apply it first.",
        )
    if last.version != version:
        raise Refused(
            f'materialization "{materialization}" was applied as version "{last.version}", '
            f'and this is version "{version}"',
            hint="Apply this version first.",
        )
