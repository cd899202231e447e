"""Who may commit: table `flow_checkpoints_v1`.

    materialization  key_begin  key_end │ fence  checkpoint

An Open adds one to the fence of every row whose range overlaps its own, in one
transaction, and takes its checkpoint from the narrowest row that covers its range.
A commit writes its checkpoint where the fence is still the one it holds; if no row
is, somebody has opened since, and everything of that transaction is rolled back.

SUBTLE: after ranges were split and are joined again, the row of the whole range, if
there is one, has the checkpoint of before the split, and what the parts did since
would be done again; if there is none, everything would be. Parts are known by rows
inside the range: then no checkpoint is taken, the recovery log decides, and the rows
inside go. Nor is anything begun from zero where somebody has written some of the keys.
"""

import base64
from dataclasses import dataclass

from penstock.errors import Fenced
from penstock.protocol.messages import START_FROM_ZERO
from penstock.protocol.ranges import KeyRange
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
    overlapping = session.run(
        f"UPDATE {table} SET fence = fence + 1 "
        "WHERE materialization = ? AND key_end >= ? AND key_begin <= ?",
        [name, begin, end],
    )
    covering = session.query(
        f"SELECT key_begin, key_end, fence, checkpoint FROM {table} "
        "WHERE materialization = ? AND key_begin <= ? AND key_end >= ? "
        "ORDER BY key_end - key_begin LIMIT 1",
        [name, begin, end],
    )
    exact = bool(covering) and (covering[0][0], covering[0][1]) == (begin, end)
    joined = 0
    if exact or not covering:
        joined = session.run(
            f"DELETE FROM {table} WHERE materialization = ? "
            "AND key_begin >= ? AND key_end <= ? AND NOT (key_begin = ? AND key_end = ?)",
            [name, begin, end, begin, end],
        )
    if covering:
        fence, written = covering[0][2], "" if joined else covering[0][3]
    else:
        fence, written = 1, "" if overlapping else _text(START_FROM_ZERO)
    if not exact:
        session.run(
            f"INSERT INTO {table} (materialization, key_begin, key_end, fence, checkpoint) "
            "VALUES (?, ?, ?, ?, ?)",
            [name, begin, end, fence, written],
        )
    elif joined:
        # Until this stream commits, nobody may take the stale one for the truth.
        session.run(
            f"UPDATE {table} SET checkpoint = ? "
            "WHERE materialization = ? AND key_begin = ? AND key_end = ?",
            [written, name, begin, end],
        )
    return Fence(name, key_range, int(fence), base64.b64decode(written))


def commit_fence(
    session: Session,
    dialect: Dialect,
    fence: Fence,
    checkpoint: bytes,
    path: tuple[str, ...] = (TABLE,),
) -> None:
    """Write a checkpoint, if nobody has opened since. Call it last in a transaction.

    Raises:
        Fenced: somebody has; roll back.
    """
    touched = session.run(
        f"UPDATE {dialect.quoted_path(path)} SET checkpoint = ? "
        "WHERE materialization = ? AND key_begin = ? AND key_end = ? AND fence = ?",
        [
            _text(checkpoint),
            fence.materialization,
            fence.key_range.begin,
            fence.key_range.end,
            fence.fence,
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
