"""The runtime's checkpoint: how far an endpoint has come, and in whose history.

Connectors keep it as bytes beside their rows, or leave that to the recovery log.
It names the collections, since a frontier means nothing in another history: a lake
that was deleted and made again would have times that look like the old ones.

    empty                                   the recovery log's checkpoint counts
    f8 ff ff ff 0f 01                       there is nothing yet, whatever the log says
    {"materialization": …, "bindings": …}   what is there
"""

from collections.abc import Mapping
from typing import Final

import msgspec

from penstock.errors import UsageError

__all__ = ["NOTHING", "ZERO", "Checkpoint", "Reached", "decode", "encode", "path_text"]

ZERO: Final = bytes.fromhex("f8ffffff0f01")
"""As a checkpoint of the wire it is empty, and it is not empty as bytes."""


class Reached(msgspec.Struct, frozen=True, omit_defaults=True):
    """How far one resource has come."""

    collection: str
    """The id of its storage location, and its own id there."""

    backfill: int
    frontier: int
    """All changes below it are there."""

    columns: str = ""
    """Which columns tell its rows apart, where all of them do."""

    layout: str = ""
    """Id of the layout of its rows; empty in checkpoints of earlier releases."""


class Checkpoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How far all resources of a materialization have come, for one range of keys."""

    materialization: str
    """The id of its recovery log's storage location."""

    bindings: Mapping[str, Reached]
    """By resource path, as `path_text` writes it."""

    version: int = 1


NOTHING: Final = Checkpoint("", {})


def path_text(path: tuple[str, ...]) -> str:
    """A resource path as a name that no other path has."""
    return msgspec.json.encode(path).decode()


def encode(checkpoint: Checkpoint) -> bytes:
    """As it travels; equal checkpoints are equal bytes."""
    return msgspec.json.encode(checkpoint, order="deterministic")


def decode(data: bytes, *, connector: str) -> Checkpoint | None:
    """What a connector was opened with; None if the recovery log counts.

    Raises:
        UsageError: it is none of ours.
    """
    if not data:
        return None
    if data == ZERO:
        return NOTHING
    try:
        found = msgspec.json.decode(data, type=Checkpoint)
    except msgspec.MsgspecError as error:
        raise _foreign(connector, "It is not one that Penstock wrote.") from error
    if found.version != 1:
        raise _foreign(connector, f"It is of version {found.version}, and this one reads 1.")
    return found


def _foreign(connector: str, detail: str) -> UsageError:
    return UsageError(
        f"connector {connector} was opened with a checkpoint that cannot be read",
        detail=detail,
        hint="Give this materialization tables of its own, or drop those that are there.",
    )
