"""What is asked of a running owner, and its answer: small objects beside the log.

Whoever asks has no lock, and must not write the log. So a request is an object
with a name of its own; the owner of the storage location looks for such objects
at every tick, does what they ask and answers with another one. Whoever asked
removes the answer. If they gave up they have removed the request, and there is no
answer; if that crossed, the owner removes the answer once it is old.

    asks/ID         {"verb": "resync", "tables": […], "keep_target": false, "asked_ms": …}
    answers/ID      {"done": true, "left": {TABLE: WHY}}  or  {"done": false, "error": …}

An ID begins with the time at which was asked.
"""

import random
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from penstock.clock import Clock
from penstock.durable import Blob
from penstock.errors import PenstockError, UsageError
from penstock.telemetry import fields, logger

__all__ = ["Request", "answer", "ask", "forget_old_answers", "requests"]

log = logger("persist")

ASKS: Final = "asks/"
ANSWERS: Final = "answers/"
ID: Final = re.compile(r"([0-9]{13})-[0-9a-f]{8}")
LOOK_MS: Final = 200
OLD_MS: Final = 3_600_000
"""Nobody waits any more for what was asked so long ago."""


@dataclass(frozen=True, slots=True)
class Request:
    """Something that the owner is asked to do."""

    id: str
    verb: str
    tables: tuple[str, ...] = ()
    keep_target: bool = False
    """Of a materialization that is dropped: whether what it wrote stays."""


class _Asked(msgspec.Struct, frozen=True):
    """A request, as it is written."""

    verb: str
    tables: tuple[str, ...] = ()
    keep_target: bool = False


def ask(
    blob: Blob,
    verb: str,
    tables: Sequence[str] = (),
    *,
    keep_target: bool = False,
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
        msgspec.json.encode(
            {
                "verb": verb,
                "tables": [*tables],
                "keep_target": keep_target,
                "asked_ms": clock.now_ms(),
            }
        ),
    )
    until = clock.boot_ms() + patience_ms
    never = threading.Event()
    withdrawn = False
    try:
        while True:
            found = blob.get(ANSWERS + id)
            if found is not None:
                blob.delete(ANSWERS + id)
                told: Mapping[str, Any] = msgspec.json.decode(found)
                return told
            if withdrawn:
                break
            if clock.boot_ms() < until:
                clock.wait(never, LOOK_MS)
            else:
                # Then one more look: it may have been answered just before.
                blob.delete(ASKS + id)
                withdrawn = True
    except KeyboardInterrupt:
        blob.delete(ASKS + id)
        raise
    raise UsageError(
        f"nobody answered a request to {verb} within {patience_ms // 1_000} s",
        detail="The request was withdrawn. If it was being carried out already, that goes on.",
        hint="See what it does, and what it waits for: penstock status LOCATION. "
        "If it does not run, start it: penstock up FILE",
    )


def requests(blob: Blob, *, now_ms: int) -> list[Request]:
    """What is asked for now, the oldest first; what cannot be understood is answered at once.

    So is what nobody can be waiting for any more: a drop must not come days after it was meant.
    """
    found = []
    for each in sorted(blob.list(ASKS), key=lambda listed: listed.key):
        id, data = each.key.removeprefix(ASKS), blob.get(each.key)
        if not id or data is None:
            continue
        try:
            said = msgspec.json.decode(data, type=_Asked)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            log.warning(
                "request is malformed and was removed",
                extra=fields(object=each.key, error=str(error)),
            )
            malformed = UsageError(
                f'request "{id}" is malformed',
                detail=f"{error}.",
                hint="Ask with: penstock resync LOCATION SOURCE",
            )
            answer(blob, Request(id, ""), error=malformed)
        else:
            asked = Request(id, said.verb, said.tables, said.keep_target)
            named = ID.fullmatch(id)
            if named is None or int(named[1]) < now_ms - OLD_MS:
                late = UsageError(f'request "{id}" came too late', hint="Ask again.")
                answer(blob, asked, error=late)
            else:
                found.append(asked)
    return found


def answer(
    blob: Blob,
    request: Request,
    *,
    left: Mapping[str, str] | None = None,
    error: PenstockError | None = None,
) -> None:
    """Say that it was done, but for the tables `left` as they are; or why not.

    Nothing is said to who does not wait any more.
    """
    if blob.get(ASKS + request.id) is None:
        return
    said = (
        {"done": True, "left": dict(left or {})}
        if error is None
        else {"done": False, "error": str(error), "detail": error.detail, "hint": error.hint}
    )
    blob.put(ANSWERS + request.id, msgspec.json.encode(said))
    blob.delete(ASKS + request.id)


def forget_old_answers(blob: Blob, *, now_ms: int) -> None:
    """Remove answers that nobody has come for."""
    for each in blob.list(ANSWERS):
        named = ID.fullmatch(each.key.removeprefix(ANSWERS))
        if named is None or int(named[1]) < now_ms - OLD_MS:
            blob.delete(each.key)
