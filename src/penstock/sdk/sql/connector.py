"""Validate, Apply and delete for SQL endpoints.

A subclass provides a dialect and sessions. Each call inspects the tables of the endpoint. Two more
tables hold the fences (`fence.py`) and the applied specification (`applied_spec.py`). An Apply is
one transaction.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, TypeVar

from pydantic import BaseModel, ConfigDict
from pydantic import Field as Setting

from penstock.errors import Problem
from penstock.protocol.messages import ValidatedBinding
from penstock.protocol.specs import MaterializationBinding
from penstock.sdk.bindings import Binding, Field
from penstock.sdk.connector import (
    ApplyRequest,
    Connector,
    OpenRequest,
    RequestedBinding,
    ValidateRequest,
)
from penstock.sdk.errors import Refused
from penstock.sdk.sql import applied_spec, fence
from penstock.sdk.sql.applied_spec import LastApplied
from penstock.sdk.sql.conflicts import ExistingTable, TableMismatch
from penstock.sdk.sql.constraints import constraints, recreation_reason
from penstock.sdk.sql.dialect import Column, Dialect
from penstock.sdk.sql.recreation import Recreation
from penstock.sdk.sql.session import Session
from penstock.sdk.sql.table_changes import change_statements, fillable

__all__ = ["DELETED", "SqlConnector", "SqlResource"]

DELETED = "flow_deleted"
"""Column that marks deleted rows, with soft deletes."""

EndpointT = TypeVar("EndpointT", bound=BaseModel)


class SqlResource(BaseModel):
    """Configuration of a table."""

    model_config = ConfigDict(extra="forbid")

    table: str = Setting(min_length=1, description="table that stores the documents")
    delta_updates: bool = Setting(
        default=False, description="insert each change, instead of storing the last state by key"
    )
    document: bool = Setting(default=True, description="require a column for the complete document")
    delete: Literal["hard", "soft"] = Setting(
        default="hard",
        description=f'remove deleted rows (hard), or mark them in column "{DELETED}" (soft)',
    )
    adopt: bool = Setting(
        default=False, description="use an existing table that the connector did not create"
    )


ResourceT = TypeVar("ResourceT", bound=SqlResource)


@dataclass(frozen=True, slots=True)
class _OwnTables:
    """Paths of the tables of the connector."""

    checkpoints: tuple[str, ...]
    applied: tuple[str, ...]


class SqlConnector(Connector[EndpointT, ResourceT]):
    """Connector of an SQL endpoint whose commits are authoritative."""

    dialect: Dialect

    @abstractmethod
    def session(self, endpoint: EndpointT, *, touch: bool) -> AbstractContextManager[Session]:
        """Return a connection to the endpoint. Without `touch`, it leaves no trace there."""

    @abstractmethod
    def path(self, endpoint: EndpointT, resource: ResourceT) -> tuple[str, ...]:
        """Return the path of the table of a resource: schema, if there is one, and name."""

    def own_table(self, endpoint: EndpointT, table: str) -> tuple[str, ...]:
        """Return the path of a table of the connector."""
        return (table,)

    def dialect_for(self, session: Session, fields: Sequence[Field]) -> Dialect:
        """Return the dialect for these fields, which may depend on the types of the endpoint."""
        return self.dialect

    def remarks(self, dialect: Dialect, binding: Binding[ResourceT]) -> Sequence[str]:
        """Return remarks for users on the columns of a binding."""
        return ()

    def create_schemas(
        self, session: Session, endpoint: EndpointT, paths: Sequence[tuple[str, ...]]
    ) -> Sequence[str]:
        """Return statements that create the missing schemas of tables at `paths`."""
        return ()

    # Validate.

    def validate(
        self, request: ValidateRequest[EndpointT, ResourceT]
    ) -> Sequence[ValidatedBinding]:
        """Return the constraints on fields, for the existing tables and for new ones."""
        paths = [self.path(request.endpoint, binding.resource) for binding in request.bindings]
        self._check_paths(request.endpoint, paths)
        with self.session(request.endpoint, touch=False) as session:
            last = self.last_applied(session, request.endpoint, request.materialization)
            validated, refusals = [], []
            for binding, path in zip(request.bindings, paths, strict=True):
                try:
                    validated.append(self._validate_binding(session, binding, path, last))
                except Refused as error:
                    refusals.append(error)
        if len(refusals) > 1:
            raise Refused(
                f"{len(refusals)} tables of the endpoint cannot be used",
                problems=[Problem(str(error), error.detail, error.hint) for error in refusals],
            )
        for refusal in refusals:
            raise refusal
        return validated

    def _validate_binding(
        self,
        session: Session,
        request: RequestedBinding[ResourceT],
        path: tuple[str, ...],
        last: LastApplied | None,
    ) -> ValidatedBinding:
        resource, delta = request.resource, request.resource.delta_updates
        dialect = self.dialect_for(session, request.fields)
        existing = self._existing_table(
            session, path, last, adopt=resource.adopt, delta_updates=delta
        )
        of_table, of_new_table = (
            constraints(
                dialect,
                request,
                table,
                delta_updates=delta,
                document=resource.document,
                extra=self.extra_columns(resource, delta_updates=delta),
            )
            for table in (existing, None)
        )
        if request.replaces and existing is not None and not existing.adopted:
            reason = recreation_reason(of_table, of_new_table)
            if reason:
                return ValidatedBinding(
                    of_new_table,
                    path,
                    delta,
                    accepts_delete=not delta,
                    accepts_empty=True,
                    rows=self._count_rows(session, path, existing, resource, last),
                    recreates=reason,
                )
        filled = last.filled(path) if last is not None else frozenset[str]()
        rows = 0
        if request.replaces and existing is not None:
            rows = self._count_rows(session, path, existing, resource, last)
        return ValidatedBinding(
            of_table,
            path,
            delta,
            accepts_delete=not delta,
            accepts_empty=True,
            fills=() if delta else (*fillable(dialect, request.fields, existing), *sorted(filled)),
            rows=rows,
            absent=existing is None,
        )

    def _count_rows(
        self,
        session: Session,
        path: tuple[str, ...],
        existing: ExistingTable,
        resource: ResourceT,
        last: LastApplied | None,
    ) -> int:
        """Return the number of rows of a table, without rows that are marked as deleted."""
        soft = resource.delete == "soft" or (last is not None and last.marks_deleted(path))
        marked = soft and existing.table.column(DELETED) is not None
        where = (
            f" WHERE {self.dialect.quoted(DELETED)} IS NOT {self.dialect.true}" if marked else ""
        )
        [(count,)] = session.query(f"SELECT count(*) FROM {self.dialect.quoted_path(path)}{where}")
        return int(count)

    def _check_paths(self, endpoint: EndpointT, paths: Sequence[tuple[str, ...]]) -> None:
        """Reject tables that are bound twice, and reserved tables."""
        places = self._own_table_paths(endpoint)
        folded = [tuple(map(self.dialect.folded, path)) for path in paths]
        for path, name in zip(paths, folded, strict=True):
            if folded.count(name) > 1:
                raise Refused(
                    f'duplicate binding: table "{".".join(path)}" is used by several bindings',
                    hint="Use a different table for each binding.",
                )
            if name in (places.checkpoints, places.applied) or name[-1].startswith(
                self.dialect.reserved
            ):
                raise Refused(
                    f'table name "{".".join(path)}" is reserved',
                    hint="Use another table.",
                )

    def _existing_table(
        self,
        session: Session,
        path: tuple[str, ...],
        last: LastApplied | None,
        *,
        adopt: bool,
        delta_updates: bool,
    ) -> ExistingTable | None:
        """Return the existing table, if this materialization may use it; None if there is none."""
        table = session.table(path)
        if table is None:
            return None
        was_delta = last.delta_updates(path) if last is not None else None
        if was_delta is None:
            self._check_adopt(session, path, adopt=adopt)
        _check_delta(path, was_delta, now=delta_updates)
        name = self.dialect.quoted_path(path)
        filled = not delta_updates and bool(
            session.query(f"SELECT EXISTS (SELECT 1 FROM {name})")[0][0]
        )
        return ExistingTable(
            table,
            filled,
            last.kinds(path) if last is not None else {},
            adopted=last is None or was_delta is None or last.is_adopted(path),
        )

    def _check_adopt(self, session: Session, path: tuple[str, ...], *, adopt: bool) -> None:
        if not adopt:
            raise Refused(
                f'table "{".".join(path)}" exists, but this materialization did not create it',
                hint="Use another table, drop this one, or set adopt: true to use it.",
            )
        self.check_adoption(session, path)

    def check_adoption(self, session: Session, path: tuple[str, ...]) -> None:
        """Reject a table that would not store values or keys exactly."""

    # Apply.

    def apply(self, request: ApplyRequest[EndpointT, ResourceT]) -> str:
        """Create and alter tables, and return the statements; a dry run only returns them."""
        endpoint = request.endpoint
        self._check_paths(endpoint, [binding.path for binding in request.bindings])
        with self.session(endpoint, touch=not request.dry_run) as session, session.transaction():
            last = self.last_applied(session, endpoint, request.materialization)
            statements = [*self._own_tables(session, endpoint, request.bindings)]
            adopted = set()
            filled: dict[tuple[str, ...], set[str]] = {}
            previous: dict[tuple[str, ...], MaterializationBinding] = {}
            remarks: list[str] = []
            for binding in request.bindings:
                existing = self._existing_table(
                    session,
                    binding.path,
                    last,
                    adopt=binding.resource.adopt,
                    delta_updates=binding.delta_updates,
                )
                if existing is None and binding.index not in request.recreates:
                    _check_not_dropped(request.materialization, binding.path, last)
                try:
                    changed = self._changes(session, binding, existing, last)
                except TableMismatch:
                    before = last.binding(binding.path) if last is not None else None
                    is_adopted = existing is None or existing.adopted
                    if is_adopted or before is None or binding.index not in request.recreates:
                        raise
                    previous[binding.path] = before
                    recreation = self._recreation(session, request, binding)
                    remarks += [
                        f"in the first transaction: {statement}"
                        for statement in (recreation.drop, recreation.create)
                    ]
                    continue
                statements += changed
                if changed:
                    dialect = self.dialect_for(session, binding.fields)
                    remarks += self.remarks(dialect, binding)
                if existing is not None and existing.adopted:
                    adopted.add(binding.path)
                if not binding.delta_updates:
                    dialect = self.dialect_for(session, binding.fields)
                    selected = {field.name for field in binding.fields}
                    known = last.filled(binding.path) if last is not None else frozenset[str]()
                    filled[binding.path] = {
                        *fillable(dialect, binding.fields, existing),
                        *selected.intersection(known),
                    }
            if request.dry_run:
                return _describe(statements, remarks)
            for statement in statements:
                session.run(statement)
            spec = applied_spec.without_secrets(request.spec)
            spec = applied_spec.with_adopted(spec, adopted)
            spec = applied_spec.with_filled(spec, filled)
            spec = applied_spec.with_previous(spec, previous)
            if last is None or (last.version, last.spec) != (request.version, spec):
                applied_spec.put(
                    session,
                    self.dialect,
                    self.own_table(endpoint, applied_spec.TABLE),
                    spec,
                    request.version,
                )
        return _describe(statements, remarks)

    def _own_tables(
        self, session: Session, endpoint: EndpointT, bindings: Sequence[Binding[ResourceT]]
    ) -> list[str]:
        places = self._own_table_paths(endpoint)
        statements = {
            places.checkpoints: fence.create_checkpoints(self.dialect, places.checkpoints),
            places.applied: applied_spec.create_applied(self.dialect, places.applied),
        }
        paths = [*statements, *(binding.path for binding in bindings)]
        return [
            *self.create_schemas(session, endpoint, paths),
            *(statement for path, statement in statements.items() if session.table(path) is None),
        ]

    def _changes(
        self,
        session: Session,
        binding: Binding[ResourceT],
        existing: ExistingTable | None,
        last: LastApplied | None,
    ) -> Sequence[str]:
        path, resource, delta = binding.path, binding.resource, binding.delta_updates
        dialect = self.dialect_for(session, binding.fields)
        extra = self.extra_columns(resource, delta_updates=delta)
        statements = [*change_statements(dialect, binding, existing, extra)]
        marked = last is not None and last.marks_deleted(path) and not extra
        if marked and existing is not None and existing.table.column(DELETED) is not None:
            # Loads have ignored the marked rows. With hard deletes, the rows must be removed.
            mark = f"{dialect.quoted(DELETED)} = {dialect.true}"
            marked_rows = f"FROM {dialect.quoted_path(path)} WHERE {mark}"
            if session.query(f"SELECT count(*) {marked_rows}")[0][0]:
                statements.append(f"DELETE {marked_rows}")
        return statements

    def recreations(
        self,
        session: Session,
        request: OpenRequest[EndpointT, ResourceT],
        last: LastApplied | None,
    ) -> Mapping[int, Recreation]:
        """Return the pending recreations of tables, by index of the binding."""
        return {
            binding.index: self._recreation(session, request, binding)
            for binding in request.bindings
            if last is not None and last.is_pending(binding.path)
        }

    def _recreation(
        self,
        session: Session,
        request: ApplyRequest[EndpointT, ResourceT] | OpenRequest[EndpointT, ResourceT],
        binding: Binding[ResourceT],
    ) -> Recreation:
        dialect = self.dialect_for(session, binding.fields)
        extra = self.extra_columns(binding.resource, delta_updates=binding.delta_updates)
        return Recreation(
            dialect,
            dialect.table(binding, extra),
            request.materialization,
            self._own_table_paths(request.endpoint).applied,
        )

    def extra_columns(self, resource: ResourceT, *, delta_updates: bool) -> Sequence[Column]:
        """Return the columns of the table that are not fields."""
        if delta_updates or resource.delete == "hard":
            return ()
        return [Column(DELETED, self.dialect.boolean_type, nullable=True)]

    # Delete.

    def delete(self, request: ApplyRequest[EndpointT, ResourceT]) -> str:
        """Drop the tables that Apply has created, and reset the fences.

        Adopted tables remain, even if the resource does not have `adopt` any longer.
        """
        endpoint, name = request.endpoint, request.materialization
        with self.session(endpoint, touch=not request.dry_run) as session, session.transaction():
            last = self.last_applied(session, endpoint, name)
            if last is None:
                return ""
            if last.version != request.version:
                raise Refused(
                    f'materialization "{name}" was applied as version "{last.version}", '
                    f'but the request deletes version "{request.version}"',
                    hint="Delete the applied version.",
                )
            statements = [
                self.dialect.drop_table(binding.resource_path)
                for binding in last.spec.bindings
                if not last.is_adopted(binding.resource_path)
            ]
            if request.dry_run:
                return _describe(statements)
            for statement in statements:
                session.run(statement)
            places = self._own_table_paths(endpoint)
            applied_spec.delete(session, self.dialect, places.applied, name)
            fence.reset_fences(session, self.dialect, name, places.checkpoints)
        return _describe(statements)

    # The applied specification.

    def last_applied(
        self, session: Session, endpoint: EndpointT, materialization: str
    ) -> LastApplied | None:
        """Return the applied specification; None if nothing was applied."""
        path = self._own_table_paths(endpoint).applied
        if session.table(path) is None:
            return None
        return applied_spec.last_applied(session, self.dialect, path, materialization)

    def _own_table_paths(self, endpoint: EndpointT) -> _OwnTables:
        return _OwnTables(
            self.own_table(endpoint, fence.TABLE), self.own_table(endpoint, applied_spec.TABLE)
        )


def _check_delta(path: tuple[str, ...], was: bool | None, *, now: bool) -> None:
    if was and not now:
        raise Refused(
            f'table "{".".join(path)}" has delta updates: '
            "changing from delta updates to standard updates is not allowed",
            detail="The table has one row per change, and no key.",
            hint="Use another table, or drop this one.",
        )


def _check_not_dropped(
    materialization: str, path: tuple[str, ...], last: LastApplied | None
) -> None:
    """Reject a table that an earlier Apply created or adopted and that does not exist (C15).

    Apply records a table in the transaction that creates it, so another program has dropped it.
    """
    if last is not None and last.binding(path) is not None:
        raise Refused(
            f'table "{".".join(path)}" of materialization "{materialization}" does not exist',
            detail="The table existed when the materialization was applied. A new table would not "
            "contain the rows that were stored before.",
            hint="Restore the table, or raise the backfill of its binding by one.",
        )


def _describe(statements: Sequence[str], remarks: Sequence[str] = ()) -> str:
    lines = [
        *(f"{statement};\n" for statement in statements),
        *(f"-- {text}\n" for text in remarks),
    ]
    return "".join(lines)
