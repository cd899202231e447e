"""Runtime checkpoint: the frontier of each resource, and the id of its collection.

A connector stores the checkpoint as bytes next to its rows, or leaves it to the recovery log.
A frontier is valid only in one history. If a lake is deleted and created again, its new times
look like the old ones. The checkpoint therefore includes the ids of the collections.

A connector returns one of three values in Opened:

    empty                                   the checkpoint of the recovery log is valid
    f8 ff ff ff 0f 01                       the endpoint holds nothing; ignore the recovery log
    {"materialization": …, "bindings": …}   the endpoint holds this
"""

from collections.abc import Mapping
from typing import Final

import msgspec

from penstock.errors import UsageError

__all__ = ["NOTHING", "ZERO", "Checkpoint", "ResourceProgress", "decode", "encode", "path_text"]

ZERO: Final = bytes.fromhex("f8ffffff0f01")
"""Checkpoint of an endpoint that holds nothing.

These bytes decode to an empty checkpoint message, but are not empty.
"""


class ResourceProgress(msgspec.Struct, frozen=True, omit_defaults=True):
    """Progress of one resource."""

    collection: str
    """Id of the storage location and id of the collection in it."""

    backfill: int
    frontier: int
    """Time below which the resource holds all changes."""

    columns: str = ""
    """Hash of the columns if all of them identify a row; empty if there is a key."""

    layout: str = ""
    """Id of the layout of its rows; empty in checkpoints of earlier releases."""


class Checkpoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Progress of all resources of a materialization, for one key range."""

    materialization: str
    """Id of the storage location that holds the recovery log."""

    bindings: Mapping[str, ResourceProgress]
    """Progress by resource path, as `path_text` writes it."""

    version: int = 1


NOTHING: Final = Checkpoint("", {})


def path_text(path: tuple[str, ...]) -> str:
    """Return a unique text for a resource path."""
    return msgspec.json.encode(path).decode()


def encode(checkpoint: Checkpoint) -> bytes:
    """Return the encoded checkpoint; equal checkpoints have equal bytes."""
    return msgspec.json.encode(checkpoint, order="deterministic")


def decode(data: bytes, *, connector: str) -> Checkpoint | None:
    """Return the checkpoint in Opened; None if the checkpoint of the recovery log is valid.

    Raises:
        UsageError: Penstock did not write the checkpoint, or it has another version.
    """
    if not data:
        return None
    if data == ZERO:
        return NOTHING
    try:
        checkpoint = msgspec.json.decode(data, type=Checkpoint)
    except msgspec.MsgspecError as error:
        raise _foreign(connector, "Penstock did not write it.") from error
    if checkpoint.version != 1:
        raise _foreign(
            connector, f"Its version is {checkpoint.version}, and this release reads version 1."
        )
    return checkpoint


def _foreign(connector: str, detail: str) -> UsageError:
    return UsageError(
        f"connector {connector} was opened with a checkpoint that cannot be read",
        detail=detail,
        hint="Give this materialization its own resources, or drop the existing ones.",
    )
