"""Tracked tables of a source: snapshot, drift and comparison.

    copied      as of a snapshot (`first_copies.py`); visible together, once all are complete
    cured       when the catalog shows a change without a message (`drift.py`, `cures.py`)
    compared    with their collections, as of the snapshot that ends the tick

`source.py` owns the stream, and passes in a function that reads it further.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from penstock.errors import DefiniteError, InternalError, UsageError
from penstock.sources.postgres.catalog import PgTable, describe, published_tables
from penstock.sources.postgres.config import PostgresConfig
from penstock.sources.postgres.cures import (
    Cure,
    Follow,
    GiveUp,
    Join,
    Resync,
    Situation,
    cures,
    misfit,
)
from penstock.sources.postgres.drift import compare
from penstock.sources.postgres.errors import (
    ComparisonRaced,
    TableGone,
    TableUntrackable,
)
from penstock.sources.postgres.fingerprint import Fingerprint, TableMark, fingerprint
from penstock.sources.postgres.first_copies import FirstCopies
from penstock.sources.postgres.pgoutput import Relation
from penstock.sources.postgres.reading import Following, Phase, Reading
from penstock.sources.postgres.tables import Misfit, Table, defaults_of, follow, reads, refit
from penstock.sources.postgres.upstream import Export, Upstream
from penstock.sources.source import TickTransaction
from penstock.telemetry import fields, logger

__all__ = ["Followed", "check_collections"]

log = logger("sources.postgres")

COMPARE_ATTEMPTS: Final = 4
"""Number of comparisons in one tick after which a table that is altered in each is errored."""


class Followed:
    """All tables of one source."""

    def __init__(
        self,
        name: str,
        config: PostgresConfig,
        upstream: Upstream,
        *,
        location: str,
        tasks: int,
        read: Callable[[Reading, int], None],
        reached: Callable[[], int],
    ) -> None:
        """Create an empty set of tables; `begin` or `go_on` fills it.

        `read` reads the stream up to a position, and `reached` returns the position of the server.
        """
        self.name = name
        self._config = config
        self._upstream = upstream
        self._location = location
        self.copies = FirstCopies(config, upstream, tasks=tasks)
        self._read = read
        self._reached = reached
        self.tables: dict[int, Following] = {}
        self.fingerprint: Fingerprint | None = None
        self._asked: set[str] | None = None
        """Tables to compare at the next tick: empty for all, None for no request."""

        self._comparing = ""
        """Comparison in progress, for display."""

        self.forgotten: set[int] = set()
        """Oids of tables that another table replaced or that are no longer published."""

    def take_fingerprint(self) -> Fingerprint:
        """Read the fingerprint that the first tick compares with.

        SUBTLE: it is read before the snapshot is exported. A COPY reads a table that is rewritten
        after the export as empty, so the first tick must detect the rewrite.
        """
        self.tables = {}
        self.fingerprint = self._look()
        return self.fingerprint

    def begin(self, export: Export) -> None:
        """Track every selected table from a snapshot on."""
        published = published_tables(self._upstream.control, self._config.publication)
        self.tables = {
            each.oid: Following(
                self._follow(each),
                Phase.LOADING,
                export.consistent_point,
                attempt=self._upstream.another(),
            )
            for each in self._chosen(published)
        }
        self.trackable(self.tables.values())

    def trackable(self, tables: Iterable[Following]) -> list[Following]:
        """Return the tables that a collection can hold, and mark the others errored."""
        found = []
        for each in tables:
            try:
                self.copies.check(each.table)
            except TableUntrackable as error:
                log.warning(
                    "table cannot be tracked",
                    extra=fields(
                        source=self.name,
                        table=each.table.name,
                        error=str(error),
                        detail=error.detail,
                    ),
                )
                each.phase, each.has_collection = Phase.ERRORED, False
                each.error, each.failure = str(error), error
            else:
                found.append(each)
        return found

    def go_on(self, tables: Sequence[Following], last: Fingerprint | None) -> None:
        """Resume tracking the tables of an earlier run.

        Raises:
            UsageError: the options of a table in the file have changed since it was first
                tracked, or two tables have the same collection.
        """
        check_collections(self.name, self._location, [each.table for each in tables])
        for each in tables:
            if each.phase != Phase.ERRORED:
                self._check_said(each.table)
        self.tables = {each.table.oid: each for each in tables}
        self.fingerprint = last

    def _check_said(self, table: Table) -> None:
        name, spec = table.described.table_name, self._config.spec_of(table.described.table_name)
        what = f'table "{name}" of source "{self.name}"'
        if spec is None:
            raise UsageError(
                f"{what} is followed, and the file does not name it any more",
                hint="Name it again under tables. To let it go, take it out of the publication.",
            )
        for option, said, was in (
            ("exclude", spec.exclude, table.spec.exclude),
            ("text", spec.text, table.spec.text),
        ):
            if {*said} != {*was}:
                raise UsageError(
                    f"{what} is followed with {option}: [{', '.join(was)}], and the file says "
                    f"{option}: [{', '.join(said)}]",
                    detail="What its collection holds cannot be changed so.",
                    hint="Say what it was. To follow it otherwise, name another source for it.",
                )

    @property
    def pending(self) -> set[str]:
        """Return the names of the pending changes of tables that are not visible yet."""
        return {
            each.pending
            for each in self.tables.values()
            if each.phase in (Phase.LOADING, Phase.LOADED)
        }

    @property
    def seen(self) -> list[str]:
        """Return the collections of visible tables."""
        return [
            each.table.collection
            for each in self.tables.values()
            if each.phase == Phase.LIVE or (each.phase == Phase.ERRORED and each.seen)
        ]

    @property
    def tracks_any(self) -> bool:
        """Return whether a collection can hold at least one of the tables."""
        return any(each.has_collection for each in self.tables.values())

    @property
    def asked(self) -> bool:
        """Return whether a comparison of tables is requested for the next tick."""
        return self._asked is not None

    @property
    def is_loaded(self) -> bool:
        """Return whether every table is either visible or errored."""
        return all(each.phase in (Phase.LIVE, Phase.ERRORED) for each in self.tables.values())

    def waits_for(self) -> str:
        """Return the operation in progress, or an empty string; safe from another thread."""
        copying = self.copies.running()
        return self._comparing or (f"the first copy of {copying.name}" if copying else "")

    def status(self) -> list[Mapping[str, Any]]:
        """Return the status of each table, for display."""
        self.copies.count()
        return [
            {
                "name": each.table.name,
                "collection": each.table.collection,
                "phase": str(each.phase),
                "rows": each.rows,
                "estimated_rows": each.table.described.estimated_rows,
                "bytes": each.table.described.bytes,
                "error": each.error or None,
                "error_detail": "" if each.failure is None else each.failure.detail,
                "error_hint": "" if each.failure is None else each.failure.hint,
            }
            for each in self.tables.values()
        ]

    def join_named(self) -> None:
        """Add tables that were published before and are newly named in the file."""
        published = published_tables(self._upstream.control, self._config.publication)
        for each in self._chosen(published):
            if each.oid not in self.tables:
                self._join(each.oid, str(each.table_name))

    def reveal(self, reading: Reading, bound: int) -> None:
        """Make all loaded tables visible together, unless one is not complete at `bound`."""
        for oid, error in list(reading.broken.items()):
            if not self.tables[oid].seen:
                reading.fail(self.tables[oid], reading.broken.pop(oid, error))
        waiting = [each for each in self.tables.values() if each.has_collection and not each.seen]
        if any(
            each.phase == Phase.LOADING
            or (each.phase == Phase.LOADED and each.snapshot_lsn > bound)
            for each in waiting
        ):
            return
        for following in waiting:
            reading.reveal(following)

    # Drift and the actions for it.

    def cure(self, tick: TickTransaction, reading: Reading, bound: int) -> int:
        """Apply the actions for changes without a message, and return the new bound of the tick."""
        self.copies.begin_exported()
        done = self.copies.done()
        bound = self._cure(tick, reading, bound)
        self.copies.keep(tick, reading, done)
        return bound

    def give_up_without_publication(self, tick: TickTransaction, reading: Reading) -> bool:
        """Mark all tables errored if the publication is missing; return False if it exists."""
        after = self._look()
        if self.fingerprint is None or after.publication is not None:
            return False
        for cure in self._wanted(self.fingerprint, after, reading):
            self._obey(tick, reading, cure)
        self.fingerprint, self._asked = after, None
        return True

    def _cure(self, tick: TickTransaction, reading: Reading, bound: int) -> int:
        compared: set[int] = set()
        for _ in range(COMPARE_ATTEMPTS):
            bound, wanted = self._settled(reading, bound, compared)
            for cure in wanted:
                self._obey(tick, reading, cure)
            left = [self.tables[cure.oid] for cure in wanted if isinstance(cure, Resync)]
            if not left:
                break
            bound, these = self._resync(tick, reading, left)
            compared |= these
            if len(these) == len(left):
                break
        else:
            for oid in [each for each in reading.odd if each not in compared]:
                error = ComparisonRaced(
                    location=self._location,
                    source=self.name,
                    table=self.tables[oid].table.described.table_name,
                    attempts=COMPARE_ATTEMPTS,
                )
                self._give_up(reading, self.tables[oid], error)
        self._asked = None
        return bound

    def _settled(self, reading: Reading, bound: int, compared: set[int]) -> tuple[int, list[Cure]]:
        """Return the position up to which the stream was read, and the actions to apply.

        A table in `compared` is compared again only if a mismatch was found since.
        """
        before = self.fingerprint
        if before is None:
            raise InternalError(f'source "{self.name}" has no fingerprint')

        def wanted(after: Fingerprint) -> list[Cure]:
            return [
                cure
                for cure in self._wanted(before, after, reading)
                if not isinstance(cure, Resync)
                or cure.oid not in compared
                or cure.oid in reading.odd
            ]

        after = self._look()
        if wanted(after):
            # The message that explains a change may be in the stream beyond the bound.
            while True:
                bound = max(bound, self._reached())
                self._read(reading, bound)
                again = self._look()
                if again == after:
                    break
                after = again
        found = wanted(after)
        self._review_untracked(before, after)
        self.fingerprint = after
        return bound, found

    def _review_untracked(self, before: Fingerprint, after: Fingerprint) -> None:
        """Forget untracked tables that are no longer published, and retry changed ones."""
        for oid in [oid for oid, each in self.tables.items() if not each.has_collection]:
            mark = after.tables.get(oid)
            if mark is None or not mark.published:
                del self.tables[oid]
                self.forgotten.add(oid)
            elif mark != before.tables.get(oid):
                del self.tables[oid]
                self._join(oid, str(mark.name))
                if oid not in self.tables:
                    self.forgotten.add(oid)

    def _wanted(self, before: Fingerprint, after: Fingerprint, reading: Reading) -> list[Cure]:
        live = {oid: each.table for oid, each in self.tables.items() if each.phase != Phase.ERRORED}
        situation = Situation(
            self._location,
            self._config.publication,
            live,
            {oid for oid in live if not self.tables[oid].seen},
            reading.truncated_by,
        )
        wanted = {cure.oid: cure for cure in cures(compare(before, after), situation)}
        compared: dict[int, str] = {
            # The columns were learned from the stream, and changed back before this inspection.
            oid: "its columns changed for a while"
            for oid, table in live.items()
            if oid not in wanted and not _agree(table.described, after.tables.get(oid))
        }
        # Messages of a mismatched table were skipped, so a new description alone does not suffice.
        compared |= {oid: why for oid, why in reading.odd.items() if oid in live}
        if self._asked is not None:
            compared |= {
                oid: "it was asked for"
                for oid, each in self.tables.items()
                if each.seen and (not self._asked or each.table.name in self._asked)
            }
        for oid, reason in compared.items():
            if not isinstance(wanted.get(oid), GiveUp | Resync):
                wanted[oid] = Resync(oid, reason)
        return [wanted[oid] for oid in sorted(wanted)]

    def _obey(self, tick: TickTransaction, reading: Reading, cure: Cure) -> None:
        match cure:
            case GiveUp(oid=oid, error=error):
                self._give_up(reading, self.tables[oid], error)
            case Follow(oid=oid):
                following = self.tables[oid]
                described = self._described(oid)
                if described is None:
                    return  # Dropped since; the next inspection detects it.
                self._follow_on(tick, reading, following, self._fit(following, described))
            case Resync(oid=oid, reason=reason):
                following = self.tables[oid]
                reading.pass_over(following, reason)
                log.info(
                    "table is compared",
                    extra=fields(source=self.name, table=following.table.name, reason=reason),
                )
            case Join(oid=oid, name=name):
                self._join(oid, name)

    def _give_up(self, reading: Reading, following: Following, error: DefiniteError) -> None:
        log.warning("table is in error", extra=fields(source=self.name, error=str(error)))
        self.copies.abandon(following)
        reading.compared(following)
        reading.fail(following, error)

    def _follow_on(
        self, tick: TickTransaction, reading: Reading, following: Following, fitted: Table | Misfit
    ) -> None:
        """Adopt the new description of a table, and extend its collection if columns were added."""
        before = following.table
        if isinstance(fitted, Misfit):
            self._give_up(reading, following, misfit(before, fitted, location=self._location))
        elif fitted.schema.equals(before.schema, check_metadata=True):
            if (fitted.columns, fitted.key) != (before.columns, before.key):
                reading.flush(following)
            following.table = fitted
        elif not following.seen:
            self._reload(tick, reading, following, fitted)
        else:
            reading.flush(following)
            following.table = fitted
            added = fitted.columns[len(before.columns) :]
            tick.grow(fitted.collection, fitted.schema, defaults_of(added))

    def _reload(
        self, tick: TickTransaction, reading: Reading, following: Following, table: Table
    ) -> None:
        """Restart the initial snapshot of a table that changed during it."""
        log.info(
            "table changed while it was being copied; copying again",
            extra=fields(source=self.name, table=table.name),
        )
        self.copies.abandon(following)
        reading.compared(following)
        tick.drop_side_rows(following.pending)
        following.table, following.phase = table, Phase.LOADING
        self.copies.begin_anew([following])

    def learn(
        self, reading: Reading, tick: TickTransaction, following: Following, relation: Relation
    ) -> bool:
        """Adopt the new columns of messages; return whether the catalog has them and they fit."""
        described = self._described(following.table.oid)
        if described is None:
            return False
        fitted = self._fit(following, described)
        if isinstance(fitted, Misfit) or not reads(fitted, relation):
            return False
        if following.seen and fitted.numbers != {**fitted.numbers, **following.table.numbers}:
            return False  # A column was dropped or replaced: rows may hold any value.
        self._follow_on(tick, reading, following, fitted)
        return True

    def _join(self, oid: int, name: str) -> None:
        if oid in self.tables:
            if self.tables[oid].phase != Phase.ERRORED:
                return  # The table was stored, but not the tick that added it.
            log.warning(
                "table is published again; to follow it again, resync it",
                extra=fields(source=self.name, table=name),
            )
            return
        described = self._described(oid)
        if described is None:
            return
        if self._config.spec_of(described.table_name) is None:
            log.warning(
                "table is published and not followed",
                extra=fields(source=self.name, table=name),
            )
            return
        following = Following(self._follow(described), Phase.LOADING)
        taken = {each.table.collection for each in self.tables.values()}
        if following.table.collection in taken:
            log.warning(
                "table has the name of another that was followed; to take its place, resync it",
                extra=fields(source=self.name, table=name),
            )
            return
        self.tables[oid] = following
        if self.trackable([following]):
            self.copies.begin_anew([following])

    # Comparisons.

    def ask_for_resync(self, tables: Sequence[str]) -> None:
        """Request a comparison of these tables at the next tick; of all tables if none is named.

        Raises:
            UsageError: a named table does not exist.
            DefiniteError: a named table cannot be tracked as it is now.
        """
        known = {each.table.name: each for each in self.tables.values()}
        for name in tables:
            if name not in known:
                raise UsageError(
                    f'source "{self.name}" does not follow a table "{name}"',
                    hint=f"It follows {', '.join(sorted(known))}.",
                )
        for name, following in known.items():
            if following.failure is not None and not following.has_collection and name in tables:
                raise following.failure
            if (
                not following.has_collection
                or following.phase != Phase.ERRORED
                or (tables and name not in tables)
            ):
                continue
            try:
                self._take_up(following)
            except DefiniteError as error:
                if tables:
                    raise
                log.warning(
                    "table stays in error", extra=fields(source=self.name, error=str(error))
                )
        self._asked = set(tables)

    def _take_up(self, following: Following) -> None:
        """Check that an errored table can be tracked or copied again.

        If the table was dropped, a published table of the same name replaces it.
        """
        table = following.table
        described = self._described(table.oid)
        if described is None:
            published = published_tables(self._upstream.control, self._config.publication)
            described = next(
                (
                    each
                    for each in published
                    if each.table_name == table.described.table_name and each.oid not in self.tables
                ),
                None,
            )
        if described is None:
            raise TableGone(
                location=self._location,
                source=self.name,
                table=table.described.table_name,
                publication=self._config.publication,
                dropped=True,
            )
        fitted = self._fit(following, described)
        if isinstance(fitted, Misfit) and not fitted.replaceable:
            raise misfit(table, fitted, location=self._location)
        if described.oid != table.oid:
            del self.tables[table.oid]
            self.forgotten.add(table.oid)
            following.table = replace(table, oid=described.oid)
            self.tables[described.oid] = following

    def _resync(
        self, tick: TickTransaction, reading: Reading, tables: Sequence[Following]
    ) -> tuple[int, set[int]]:
        """Make collections equal to their tables, as of a snapshot that becomes the tick's end.

        Return the end and the oids of the compared tables. The set is empty if another change was
        detected, because its action is not known yet.
        """
        export = self._upstream.export()
        try:
            self._read(reading, export.consistent_point)
            oids = {each.table.oid for each in tables}
            # SUBTLE: messages read up to the snapshot may belong to other tables, and the creation
            # of a slot can take long. So these changes are judged like all others.
            if not oids >= {*reading.odd} or self._look() != self.fingerprint:
                return export.consistent_point, set()
            compared = [each for each in tables if self._compare(tick, reading, each, export)]
        finally:
            export.close()
        return export.consistent_point, {each.table.oid for each in compared}

    def _compare(
        self, tick: TickTransaction, reading: Reading, following: Following, export: Export
    ) -> bool:
        """Compare a table as of a snapshot; return False if the table was changed during it."""
        oid = following.table.oid
        described = self._described(oid)
        if described is None:
            return False  # Dropped since; the next inspection detects it.
        fitted = self._fit(following, described)
        errored = following.phase == Phase.ERRORED
        if errored and isinstance(fitted, Misfit):
            if fitted.replaceable:
                return self._replace(tick, reading, following, described, export)
            return True
        if not following.seen and isinstance(fitted, Table):
            self._reload(tick, reading, following, fitted)
            return True
        self._follow_on(tick, reading, following, fitted)
        if isinstance(fitted, Misfit):
            return True
        parts = self.copies.pieces_of(fitted, export)
        self._comparing = f"the comparison of {fitted.name} with its collection"
        try:
            with tick.compare(fitted.collection, parts, size=described.bytes) as mend:
                if not self._is_unchanged(oid):
                    return False
                differing = mend()
        except DefiniteError as error:
            if not self._is_unchanged(oid):
                return False
            self._give_up(reading, following, error)
            return True
        finally:
            self._comparing = ""
        reading.compared(following)
        if errored:
            tick.recover(fitted.collection)
            following.phase, following.error, following.failure = Phase.LIVE, "", None
        log.info(
            "table was compared",
            extra=fields(source=self.name, table=fitted.name, differing=differing),
        )
        return True

    def _replace(
        self,
        tick: TickTransaction,
        reading: Reading,
        following: Following,
        described: PgTable,
        export: Export,
    ) -> bool:
        """Copy an errored table into a new collection, as of a snapshot.

        Return False if the table was changed during the copy.
        """
        table = self._follow(described)
        parts = self.copies.pieces_of(table, export)
        self._comparing = f"the snapshot of {table.name} for its new collection"
        try:
            self.copies.check(table)
            with tick.replace(
                table.collection, table.schema, table.key_columns, parts, size=described.bytes
            ) as move:
                if not self._is_unchanged(table.oid):
                    return False
                rows = move()
        except DefiniteError as error:
            if not self._is_unchanged(table.oid):
                return False
            log.warning("table stays in error", extra=fields(source=self.name, error=str(error)))
            reading.compared(following)
            return True
        finally:
            self._comparing = ""
        reading.compared(following)
        following.table, following.told, following.rows = table, None, rows
        following.phase, following.error, following.failure = Phase.LIVE, "", None
        log.info(
            "table was copied into a new collection",
            extra=fields(source=self.name, table=table.name, rows=rows),
        )
        return True

    def _is_unchanged(self, oid: int) -> bool:
        """Return whether nothing happened to a table since it was last inspected."""
        # SUBTLE: a COPY that starts after a rewrite, with a snapshot from before it, reads the
        # table as empty. So nothing may have happened to the table since.
        known = self.fingerprint
        return known is not None and self._look().tables.get(oid) == known.tables.get(oid)

    # Catalog access.

    def _fit(self, following: Following, described: PgTable) -> Table | Misfit:
        """Return the table as it is tracked from now on, or the schema mismatch."""
        table = following.table
        if described.table_name != table.described.table_name:
            return Misfit(f"it is now {described.table_name}")
        if not described.published:
            return Misfit("it is not published")
        if described.replica_identity != "f" and not described.identity:
            return Misfit("it has no replica identity")
        if not following.seen:
            return follow(self.name, described, table.spec, collection=table.collection)
        return refit(table, described, asked=following.phase == Phase.ERRORED)

    def _look(self) -> Fingerprint:
        return fingerprint(
            self._upstream.control,
            self._config.publication,
            self.tables,
            last=self.fingerprint,
        )

    def _described(self, oid: int) -> PgTable | None:
        found = describe(self._upstream.control, self._config.publication, [oid])
        return next((each for each in found if each.oid == oid), None)

    def _chosen(self, published: Sequence[PgTable]) -> list[PgTable]:
        return [each for each in published if self._config.spec_of(each.table_name) is not None]

    def _follow(self, described: PgTable) -> Table:
        spec = self._config.spec_of(described.table_name)
        if spec is None:
            raise InternalError(f'table "{described.table_name}" is not to be followed')
        return follow(self.name, described, spec)


def _agree(described: PgTable, mark: TableMark | None) -> bool:
    """Return whether a description has the same columns as a fingerprint."""
    return mark is None or [
        (column.number, column.name, column.type.oid, column.typmod) for column in described.columns
    ] == [(column.number, column.name, column.type, column.typmod) for column in mark.columns]


def check_collections(source: str, location: str, tables: Sequence[Table]) -> None:
    """Reject state of an earlier version, which allowed two tables to share a collection.

    Raises:
        UsageError: two of the tables have the same collection.
    """
    owners: dict[str, Table] = {}
    for table in tables:
        other = owners.setdefault(table.collection, table)
        if other is not table:
            raise UsageError(
                f'tables {other.name} and {table.name} of source "{source}" share the collection '
                f'"{table.collection}"',
                detail="The collection holds rows of both tables. An earlier version did not quote "
                "names with dots.",
                hint=f"Drop the source (penstock drop {location} {source}) and start it again: "
                "each table then has its own collection.",
            )
