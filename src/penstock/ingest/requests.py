"""What is asked of a running owner, and its answer: small objects beside the log.

Whoever asks has no lock, and must not write the log. So a request is an object
with a name of its own; the owner of the storage location looks for such objects
at every tick, does what they ask and answers with another one. Both are removed
by whoever asked, or by the owner once they are old.

    asks/ID         {"verb": "resync", "tables": […], "asked_ms": …}
    answers/ID      {"done": true, "left": {TABLE: ERROR}}  or  {"done": false, "error": …}
"""

import random
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from penstock.clock import Clock
from penstock.durable import Blob
from penstock.errors import PenstockError, UsageError

__all__ = ["Request", "answer", "ask", "requests"]

ASKS: Final = "asks/"
ANSWERS: Final = "answers/"
LOOK_MS: Final = 200


@dataclass(frozen=True, slots=True)
class Request:
    """Something that the owner is asked to do."""

    id: str
    verb: str
    tables: tuple[str, ...]


def ask(
    blob: Blob,
    verb: str,
    tables: Sequence[str],
    *,
    clock: Clock,
    chance: random.Random,
    patience_ms: int,
) -> Mapping[str, Any]:
    """Ask, and wait for the answer.

    Raises:
        UsageError: nobody answered in time; the request is withdrawn.
    """
    id = f"{clock.now_ms():013d}-{chance.getrandbits(32):08x}"
    blob.put(
        ASKS + id,
        msgspec.json.encode({"verb": verb, "tables": [*tables], "asked_ms": clock.now_ms()}),
    )
    until = clock.boot_ms() + patience_ms
    never = threading.Event()
    while clock.boot_ms() < until:
        found = blob.get(ANSWERS + id)
        if found is not None:
            blob.delete(ANSWERS + id)
            told: Mapping[str, Any] = msgspec.json.decode(found)
            return told
        clock.wait(never, LOOK_MS)
    blob.delete(ASKS + id)
    raise UsageError(
        f"nobody answered a request to {verb} within {patience_ms // 1_000} s",
        detail="The request was withdrawn, unless it is being carried out just now.",
        hint="Start the pipeline with: penstock ingest FILE",
    )


def requests(blob: Blob) -> list[Request]:
    """What is asked for now, the oldest first."""
    found = []
    for each in sorted(blob.list(ASKS), key=lambda listed: listed.key):
        data = blob.get(each.key)
        if data is not None:
            said = msgspec.json.decode(data)
            found.append(
                Request(each.key.removeprefix(ASKS), str(said["verb"]), tuple(said["tables"]))
            )
    return found


def answer(
    blob: Blob,
    request: Request,
    *,
    left: Mapping[str, str] | None = None,
    error: PenstockError | None = None,
) -> None:
    """Say that it was done, but for the tables `left` in error; or why not."""
    said = (
        {"done": True, "left": dict(left or {})}
        if error is None
        else {"done": False, "error": str(error), "detail": error.detail, "hint": error.hint}
    )
    blob.put(ANSWERS + request.id, msgspec.json.encode(said))
    blob.delete(ASKS + request.id)
