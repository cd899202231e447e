"""Who may commit: table `flow_checkpoints_v1`.

    materialization  key_begin  key_end │ fence  checkpoint

An Open adds one to the fence of every row whose range overlaps its own, in one
transaction, and takes its checkpoint from the narrowest row that covers its range.
A commit writes its checkpoint where the fence is still the one it holds; if no row
is, somebody has opened since, and everything of that transaction is rolled back.

SUBTLE: after ranges were split and are joined again, a row that covers the joined one
has the checkpoint of before the split, and what the parts did since would be done
again; if there is none, everything would be. A range is known to be joined by the rows
inside, if together they have all of its keys, or it has a row of its own, or no row
covers it. Then no checkpoint is taken, the recovery log decides, and the rows inside
go. Nor is anything begun from zero where somebody has written some of the keys.

SUBTLE: a row that goes leaves its fence, or a higher one, to the row that takes its
place, and whoever opens inherits the highest of those that cover it. Else a range that
is split off again would one day have the fence that somebody holds who hung since.
"""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.errors import Fenced
from penstock.protocol.key_range import KeyRange
from penstock.protocol.messages import START_FROM_ZERO
from penstock.sdk.sql.dialect import Dialect
from penstock.sdk.sql.session import Session

__all__ = ["TABLE", "Fence", "commit_fence", "create_checkpoints", "forget_fences", "install_fence"]

TABLE = "flow_checkpoints_v1"


@dataclass(frozen=True, slots=True)
class Fence:
    """What one stream holds."""

    materialization: str
    key_range: KeyRange
    fence: int
    checkpoint: bytes
    """Where to go on; empty, if the recovery log knows."""


def create_checkpoints(dialect: Dialect, path: tuple[str, ...] = (TABLE,)) -> str:
    """Make the table, if it is not there."""
    return (
        f"CREATE TABLE IF NOT EXISTS {dialect.quoted_path(path)} (\n"
        "    materialization TEXT NOT NULL,\n"
        "    key_begin BIGINT NOT NULL,\n"
        "    key_end BIGINT NOT NULL,\n"
        "    fence BIGINT NOT NULL,\n"
        "    checkpoint TEXT NOT NULL,\n"
        "    PRIMARY KEY (materialization, key_begin, key_end)\n"
        ")"
    )


def install_fence(
    session: Session,
    dialect: Dialect,
    materialization: str,
    key_range: KeyRange,
    path: tuple[str, ...] = (TABLE,),
) -> Fence:
    """Fence off whoever wrote any of these keys before. Call it within a transaction."""
    table, name = dialect.quoted_path(path), materialization
    begin, end = key_range.begin, key_range.end
    where = "WHERE materialization = ? AND key_end >= ? AND key_begin <= ?"
    session.run(f"UPDATE {table} SET fence = fence + 1 {where}", [name, begin, end])
    rows = [
        _Row(KeyRange(first, last), fence, checkpoint)
        for first, last, fence, checkpoint in session.query(
            f"SELECT key_begin, key_end, fence, checkpoint FROM {table} {where}", [name, begin, end]
        )
    ]
    taken = _taken(rows, key_range)
    if taken.joined:
        session.run(
            f"DELETE FROM {table} WHERE materialization = ? AND key_begin >= ? AND key_end <= ?",
            [name, begin, end],
        )
    if taken.joined or key_range not in (each.key_range for each in rows):
        session.run(
            f"INSERT INTO {table} (materialization, key_begin, key_end, fence, checkpoint) "
            "VALUES (?, ?, ?, ?, ?)",
            [name, begin, end, taken.fence, taken.checkpoint],
        )
    return Fence(name, key_range, taken.fence, base64.b64decode(taken.checkpoint))


@dataclass(frozen=True, slots=True)
class _Row:
    key_range: KeyRange
    fence: int
    checkpoint: str


@dataclass(frozen=True, slots=True)
class _Taken:
    fence: int
    checkpoint: str
    joined: bool = False


def _taken(rows: Sequence[_Row], key_range: KeyRange) -> _Taken:
    """What a range takes from the rows that it overlaps."""
    if not rows:
        return _Taken(1, _text(START_FROM_ZERO))
    highest = max(each.fence for each in rows)
    covering = [each for each in rows if each.key_range.covers(key_range)]
    inside = [
        each.key_range
        for each in rows
        if key_range.covers(each.key_range) and each.key_range != key_range
    ]
    if not covering:
        return _Taken(highest, "", joined=bool(inside))
    narrowest = min(covering, key=lambda row: row.key_range.width)
    exact = narrowest.key_range == key_range
    if inside and (exact or _have_all(inside, key_range)):
        # The checkpoint is wiped: until this stream commits, nobody may take the stale one.
        return _Taken(highest, "", joined=True)
    fence = narrowest.fence if exact else max(each.fence for each in covering)
    return _Taken(fence, narrowest.checkpoint)


def _have_all(parts: Sequence[KeyRange], key_range: KeyRange) -> bool:
    """Whether each key of a range is in one of the parts."""
    reached = key_range.begin
    for each in sorted(parts):
        if each.begin > reached:
            return False
        reached = max(reached, each.end + 1)
    return reached > key_range.end


def commit_fence(
    session: Session,
    dialect: Dialect,
    fence: Fence,
    checkpoint: bytes,
    path: tuple[str, ...] = (TABLE,),
    *,
    condition: str = "TRUE",
    parameters: Sequence[Any] = (),
) -> None:
    """Write a checkpoint if no newer stream has opened and the SQL `condition` holds.

    Call it last in a transaction.

    Raises:
        Fenced: no row was updated; roll back.
    """
    touched = session.run(
        f"UPDATE {dialect.quoted_path(path)} SET checkpoint = ? "
        "WHERE materialization = ? AND key_begin = ? AND key_end = ? AND fence = ? "
        f"AND {condition}",
        [
            _text(checkpoint),
            fence.materialization,
            fence.key_range.begin,
            fence.key_range.end,
            fence.fence,
            *parameters,
        ],
    )
    if touched != 1:
        raise Fenced(
            f'materialization "{fence.materialization}" {fence.key_range} was fenced off',
            detail="A newer stream has been opened; nothing of this transaction is kept.",
            hint="Stop; the other one goes on.",
        )


def forget_fences(
    session: Session, dialect: Dialect, materialization: str, path: tuple[str, ...] = (TABLE,)
) -> None:
    """Begin anew from nothing; whoever still holds one cannot commit any more.

    The rows stay: where a fence began at one again, it would be the one that somebody holds.
    """
    session.run(
        f"UPDATE {dialect.quoted_path(path)} SET fence = fence + 1, checkpoint = ? "
        "WHERE materialization = ?",
        [_text(START_FROM_ZERO), materialization],
    )


def _text(checkpoint: bytes) -> str:
    return base64.b64encode(checkpoint).decode()
