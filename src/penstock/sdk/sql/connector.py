"""What connectors of SQL endpoints share: validate, apply and delete.

A connector brings a dialect, and sessions. The endpoint's own tables are looked at
each time; beside them stand the fences (`fence.py`) and what was applied last
(`applied_spec.py`). Everything of one Apply is one transaction.
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
from penstock.sdk.connector import Applying, Asked, Connector, Opening, Validating
from penstock.sdk.errors import Refused
from penstock.sdk.sql import applied_spec, fence
from penstock.sdk.sql.applied_spec import LastApplied
from penstock.sdk.sql.conflicts import Standing, TableMismatch
from penstock.sdk.sql.constraints import constraints, recreation_reason
from penstock.sdk.sql.dialect import Column, Dialect
from penstock.sdk.sql.recreation import Recreation
from penstock.sdk.sql.session import Session
from penstock.sdk.sql.table_changes import changes, fillable

__all__ = ["DELETED", "SqlConnector", "SqlResource"]

DELETED = "flow_deleted"
"""The column of tables whose rows are only marked when they are deleted."""

EndpointT = TypeVar("EndpointT", bound=BaseModel)


class SqlResource(BaseModel):
    """Where in an SQL endpoint a collection goes."""

    model_config = ConfigDict(extra="forbid")

    table: str = Setting(min_length=1, description="the table that takes the documents")
    delta_updates: bool = Setting(
        default=False, description="insert each change, instead of keeping the last state by key"
    )
    document: bool = Setting(
        default=True, description="whether a column for the whole document must be there"
    )
    delete: Literal["hard", "soft"] = Setting(
        default="hard",
        description=f'whether deleted rows go, or are marked in column "{DELETED}"',
    )
    adopt: bool = Setting(
        default=False, description="take over a table that is there and was not made by us"
    )


ResourceT = TypeVar("ResourceT", bound=SqlResource)


@dataclass(frozen=True, slots=True)
class _Places:
    """Where the tables beside the users' are."""

    checkpoints: tuple[str, ...]
    applied: tuple[str, ...]


class SqlConnector(Connector[EndpointT, ResourceT]):
    """A connector of an SQL endpoint whose commits are authoritative."""

    dialect: Dialect

    @abstractmethod
    def session(self, endpoint: EndpointT, *, touch: bool) -> AbstractContextManager[Session]:
        """A connection to the endpoint; unless it may `touch` it, not even that is to be seen."""

    @abstractmethod
    def path(self, endpoint: EndpointT, resource: ResourceT) -> tuple[str, ...]:
        """What the table of a resource is called, with its schema if there are such."""

    def beside(self, endpoint: EndpointT, table: str) -> tuple[str, ...]:
        """What a table of our own is called."""
        return (table,)

    def dialect_for(self, session: Session, fields: Sequence[Field]) -> Dialect:
        """The dialect for these fields; an endpoint may have to be asked which types it has."""
        return self.dialect

    def remarks(self, dialect: Dialect, binding: Binding[ResourceT]) -> Sequence[str]:
        """Return what people should know of the columns that a binding gets."""
        return ()

    def surroundings(
        self, session: Session, endpoint: EndpointT, paths: Sequence[tuple[str, ...]]
    ) -> Sequence[str]:
        """Statements that make what tables at `paths` stand in and is not there yet."""
        return ()

    # Validate.

    def validate(self, asked: Validating[EndpointT, ResourceT]) -> Sequence[ValidatedBinding]:
        """Look at the endpoint's tables, and say what they ask of fields."""
        paths = [self.path(asked.endpoint, each.resource) for each in asked.bindings]
        self._check_paths(asked.endpoint, paths)
        with self.session(asked.endpoint, touch=False) as session:
            last = self.last_applied(session, asked.endpoint, asked.materialization)
            validated, refusals = [], []
            for binding, path in zip(asked.bindings, paths, strict=True):
                try:
                    validated.append(self._validated(session, binding, path, last))
                except Refused as error:
                    refusals.append(error)
        if len(refusals) > 1:
            raise Refused(
                f"{len(refusals)} tables of the endpoint cannot be used",
                problems=[Problem(str(each), each.detail, each.hint) for each in refusals],
            )
        for refusal in refusals:
            raise refusal
        return validated

    def _validated(
        self,
        session: Session,
        asked: Asked[ResourceT],
        path: tuple[str, ...],
        last: LastApplied | None,
    ) -> ValidatedBinding:
        resource, delta = asked.resource, asked.resource.delta_updates
        dialect = self.dialect_for(session, asked.fields)
        standing = self._standing(session, path, last, adopt=resource.adopt, delta_updates=delta)
        found, of_new_table = (
            constraints(
                dialect,
                asked,
                each,
                delta_updates=delta,
                document=resource.document,
                extra=self.extra_columns(resource, delta_updates=delta),
            )
            for each in (standing, None)
        )
        if asked.replaces and standing is not None and not standing.taken_over:
            reason = recreation_reason(found, of_new_table)
            if reason:
                return ValidatedBinding(
                    of_new_table,
                    path,
                    delta,
                    accepts_delete=not delta,
                    accepts_empty=True,
                    rows=self._count_rows(session, path, standing, resource, last),
                    recreates=reason,
                )
        filled = last.filled(path) if last is not None else frozenset[str]()
        rows = 0
        if asked.replaces and standing is not None:
            rows = self._count_rows(session, path, standing, resource, last)
        return ValidatedBinding(
            found,
            path,
            delta,
            accepts_delete=not delta,
            accepts_empty=True,
            fills=() if delta else (*fillable(dialect, asked.fields, standing), *sorted(filled)),
            rows=rows,
            absent=standing is None,
        )

    def _count_rows(
        self,
        session: Session,
        path: tuple[str, ...],
        standing: Standing,
        resource: ResourceT,
        last: LastApplied | None,
    ) -> int:
        """Return how many rows a table has, without those that are marked as deleted."""
        soft = resource.delete == "soft" or (last is not None and last.marks_deleted(path))
        marked = soft and standing.table.column(DELETED) is not None
        where = (
            f" WHERE {self.dialect.quoted(DELETED)} IS NOT {self.dialect.true}" if marked else ""
        )
        found = session.query(f"SELECT count(*) FROM {self.dialect.quoted_path(path)}{where}")
        return int(found[0][0])

    def _check_paths(self, endpoint: EndpointT, paths: Sequence[tuple[str, ...]]) -> None:
        """Refuse tables that are bound twice, and those that are not for users."""
        places = self._places(endpoint)
        folded = [tuple(map(self.dialect.folded, path)) for path in paths]
        for path, each in zip(paths, folded, strict=True):
            if folded.count(each) > 1:
                raise Refused(
                    f'duplicate binding: table "{".".join(path)}" is named by more than one',
                    hint="Give each binding a table of its own.",
                )
            if each in (places.checkpoints, places.applied) or each[-1].startswith(
                self.dialect.reserved
            ):
                raise Refused(
                    f'table "{".".join(path)}" has a name that is kept for our own use',
                    hint="Name another one.",
                )

    def _standing(
        self,
        session: Session,
        path: tuple[str, ...],
        last: LastApplied | None,
        *,
        adopt: bool,
        delta_updates: bool,
    ) -> Standing | None:
        """The table that is there, if this materialization may have it."""
        table = session.table(path)
        if table is None:
            return None
        was_delta = last.delta_updates(path) if last is not None else None
        if was_delta is None:
            self._check_takeover(session, path, adopt=adopt)
        _check_delta(path, was_delta, now=delta_updates)
        name = self.dialect.quoted_path(path)
        filled = not delta_updates and bool(
            session.query(f"SELECT EXISTS (SELECT 1 FROM {name})")[0][0]
        )
        return Standing(
            table,
            filled,
            last.kinds(path) if last is not None else {},
            taken_over=last is None or was_delta is None or last.taken_over(path),
        )

    def _check_takeover(self, session: Session, path: tuple[str, ...], *, adopt: bool) -> None:
        if not adopt:
            raise Refused(
                f'table "{".".join(path)}" is there, and this materialization did not make it',
                hint="Name another table, drop it, or say adopt: true to take it over.",
            )
        self.check_adoption(session, path)

    def check_adoption(self, session: Session, path: tuple[str, ...]) -> None:
        """Refuse to take over a table that would not keep values or keys as ours do."""

    # Apply.

    def apply(self, applying: Applying[EndpointT, ResourceT]) -> str:
        """Make the tables fit; a dry run says the statements and touches nothing."""
        endpoint = applying.endpoint
        self._check_paths(endpoint, [each.path for each in applying.bindings])
        with self.session(endpoint, touch=not applying.dry_run) as session, session.transaction():
            last = self.last_applied(session, endpoint, applying.materialization)
            statements = [*self._own_tables(session, endpoint, applying.bindings)]
            taken = set()
            filled: dict[tuple[str, ...], set[str]] = {}
            previous: dict[tuple[str, ...], MaterializationBinding] = {}
            remarks: list[str] = []
            for binding in applying.bindings:
                standing = self._standing(
                    session,
                    binding.path,
                    last,
                    adopt=binding.resource.adopt,
                    delta_updates=binding.delta_updates,
                )
                if standing is None and binding.index not in applying.recreates:
                    _check_not_lost(applying.materialization, binding.path, last)
                try:
                    changed = self._changes(session, binding, standing, last)
                except TableMismatch:
                    before = last.binding(binding.path) if last is not None else None
                    taken_over = standing is None or standing.taken_over
                    if taken_over or before is None or binding.index not in applying.recreates:
                        raise
                    previous[binding.path] = before
                    recreation = self._recreation(session, applying, binding)
                    remarks += [
                        f"within the first transaction: {statement}"
                        for statement in (recreation.drop, recreation.create)
                    ]
                    continue
                statements += changed
                if changed:
                    dialect = self.dialect_for(session, binding.fields)
                    remarks += self.remarks(dialect, binding)
                if standing is not None and standing.taken_over:
                    taken.add(binding.path)
                if not binding.delta_updates:
                    dialect = self.dialect_for(session, binding.fields)
                    selected = {each.name for each in binding.fields}
                    known = last.filled(binding.path) if last is not None else frozenset[str]()
                    filled[binding.path] = {
                        *fillable(dialect, binding.fields, standing),
                        *selected.intersection(known),
                    }
            if applying.dry_run:
                return _described(statements, remarks)
            for statement in statements:
                session.run(statement)
            kept = applied_spec.without_secrets(applying.spec)
            kept = applied_spec.with_takeovers(kept, taken)
            kept = applied_spec.with_filled(kept, filled)
            kept = applied_spec.with_previous(kept, previous)
            if last is None or (last.version, last.spec) != (applying.version, kept):
                applied_spec.remember(
                    session,
                    self.dialect,
                    self.beside(endpoint, applied_spec.TABLE),
                    kept,
                    applying.version,
                )
        return _described(statements, remarks)

    def _own_tables(
        self, session: Session, endpoint: EndpointT, bindings: Sequence[Binding[ResourceT]]
    ) -> list[str]:
        places = self._places(endpoint)
        wanted = {
            places.checkpoints: fence.create_checkpoints(self.dialect, places.checkpoints),
            places.applied: applied_spec.create_applied(self.dialect, places.applied),
        }
        paths = [*wanted, *(each.path for each in bindings)]
        return [
            *self.surroundings(session, endpoint, paths),
            *(statement for path, statement in wanted.items() if session.table(path) is None),
        ]

    def _changes(
        self,
        session: Session,
        binding: Binding[ResourceT],
        standing: Standing | None,
        last: LastApplied | None,
    ) -> Sequence[str]:
        path, resource, delta = binding.path, binding.resource, binding.delta_updates
        dialect = self.dialect_for(session, binding.fields)
        extra = self.extra_columns(resource, delta_updates=delta)
        statements = [*changes(dialect, binding, standing, extra)]
        marked = last is not None and last.marks_deleted(path) and not extra
        if marked and standing is not None and standing.table.column(DELETED) is not None:
            # Rows that were marked are gone for whoever loads; now they go.
            mark = f"{dialect.quoted(DELETED)} = {dialect.true}"
            gone = f"FROM {dialect.quoted_path(path)} WHERE {mark}"
            if session.query(f"SELECT count(*) {gone}")[0][0]:
                statements.append(f"DELETE {gone}")
        return statements

    def recreations(
        self,
        session: Session,
        opening: Opening[EndpointT, ResourceT],
        last: LastApplied | None,
    ) -> Mapping[int, Recreation]:
        """Return, by binding, how tables are replaced that are yet to be created again."""
        return {
            each.index: self._recreation(session, opening, each)
            for each in opening.bindings
            if last is not None and last.is_pending(each.path)
        }

    def _recreation(
        self,
        session: Session,
        request: Applying[EndpointT, ResourceT] | Opening[EndpointT, ResourceT],
        binding: Binding[ResourceT],
    ) -> Recreation:
        dialect = self.dialect_for(session, binding.fields)
        extra = self.extra_columns(binding.resource, delta_updates=binding.delta_updates)
        return Recreation(
            dialect,
            dialect.table(binding, extra),
            request.materialization,
            self._places(request.endpoint).applied,
        )

    def extra_columns(self, resource: ResourceT, *, delta_updates: bool) -> Sequence[Column]:
        """Columns that no field has."""
        if delta_updates or resource.delete == "hard":
            return ()
        return [Column(DELETED, self.dialect.boolean_type, nullable=True)]

    # Delete.

    def delete(self, applying: Applying[EndpointT, ResourceT]) -> str:
        """Drop the tables that were made, and begin anew.

        Not those that were taken over, whatever the resource says of `adopt` by now.
        """
        endpoint, name = applying.endpoint, applying.materialization
        with self.session(endpoint, touch=not applying.dry_run) as session, session.transaction():
            last = self.last_applied(session, endpoint, name)
            if last is None:
                return ""
            if last.version != applying.version:
                raise Refused(
                    f'materialization "{name}" was applied as version "{last.version}", '
                    f'and is to be deleted as version "{applying.version}"',
                    hint="Delete it as it was applied.",
                )
            statements = [
                self.dialect.drop_table(each.resource_path)
                for each in last.spec.bindings
                if not last.taken_over(each.resource_path)
            ]
            if applying.dry_run:
                return _described(statements)
            for statement in statements:
                session.run(statement)
            places = self._places(endpoint)
            applied_spec.forget(session, self.dialect, places.applied, name)
            fence.forget_fences(session, self.dialect, name, places.checkpoints)
        return _described(statements)

    # What was applied.

    def last_applied(
        self, session: Session, endpoint: EndpointT, materialization: str
    ) -> LastApplied | None:
        """What was applied last, if anything."""
        path = self._places(endpoint).applied
        if session.table(path) is None:
            return None
        return applied_spec.last_applied(session, self.dialect, path, materialization)

    def _places(self, endpoint: EndpointT) -> _Places:
        return _Places(
            self.beside(endpoint, fence.TABLE), self.beside(endpoint, applied_spec.TABLE)
        )


def _check_delta(path: tuple[str, ...], was: bool | None, *, now: bool) -> None:
    if was and not now:
        raise Refused(
            f'table "{".".join(path)}" takes delta updates: '
            "changing from delta updates to standard updates is not allowed",
            detail="It has rows for each change, and no key.",
            hint="Name another table, or drop it.",
        )


def _check_not_lost(materialization: str, path: tuple[str, ...], last: LastApplied | None) -> None:
    """Reject a table that an earlier Apply has made or taken over, and that is not there (C15).

    Apply records a table in the transaction that creates it. So somebody else has dropped it.
    """
    if last is not None and last.binding(path) is not None:
        raise Refused(
            f'table "{".".join(path)}" of materialization "{materialization}" does not exist any '
            "more",
            detail="It was there when the materialization was applied last. A new table would miss "
            "the rows that were stored before.",
            hint="Restore the table, or raise the backfill of its binding by one.",
        )


def _described(statements: Sequence[str], remarks: Sequence[str] = ()) -> str:
    return "".join([*(f"{each};\n" for each in statements), *(f"-- {each}\n" for each in remarks)])
