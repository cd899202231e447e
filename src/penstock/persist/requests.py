"""What is asked of a running owner, and its answer: small objects beside the log.

Whoever asks has no lock, and must not write the log. So a request is an object
with a name of its own; the owner of the storage location looks for such objects
at every tick, does what they ask and answers with another one. Whoever asked
removes the answer. If they gave up they have removed the request, and there is no
answer; if that crossed, the owner removes the answer once it is old. Who was killed
removes nothing, so a request also says until when it is waited for.

    asks/ID         {"verb": "resync", "tables": […], "keep_target": false,
                     "asked_ms": …, "until_ms": …}
    answers/ID      {"done": true, "left": {TABLE: WHY}, "mended": …}
                    or {"done": false, "error": …}

An ID begins with the time at which was asked.
"""

import random
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from penstock.clock import Clock
from penstock.durable import Blob
from penstock.errors import PenstockError, StoreError, UsageError
from penstock.telemetry import fields, logger

__all__ = [
    "OwnerDied",
    "Request",
    "answer",
    "ask",
    "forget_old_answers",
    "is_pending",
    "requests",
]

log = logger("persist")

ASKS: Final = "asks/"
ANSWERS: Final = "answers/"
ID: Final = re.compile(r"([0-9]{13})-[0-9a-f]{8}")
LOOK_MS: Final = 200
OLD_MS: Final = 3_600_000
"""Nobody waits any more for what was asked so long ago."""

UNSAID_MS: Final = 600_000
"""How long somebody is taken to wait who did not say it, as older versions do not."""


class OwnerDied(UsageError):
    """The owner of a storage location died before it answered a request."""

    def __init__(self, verb: str) -> None:
        super().__init__(
            f"owner died before it answered a request to {verb}",
            detail="The request was withdrawn. It may have been carried out in part.",
            hint="Start the owner again: penstock up FILE. Then repeat the request.",
        )


@dataclass(frozen=True, slots=True)
class Request:
    """Something that the owner is asked to do."""

    id: str
    verb: str
    tables: tuple[str, ...] = ()
    keep_target: bool = False
    """Of a materialization that is dropped: whether what it wrote stays."""

    until_ms: int | None = None
    """Until when somebody waits for it, by their calendar; None if they did not say."""

    def is_late(self, now_ms: int) -> bool:
        """Whether nobody can be waiting for it any more."""
        named = ID.fullmatch(self.id)
        if named is None or int(named[1]) < now_ms - OLD_MS:
            return True
        until_ms = int(named[1]) + UNSAID_MS if self.until_ms is None else self.until_ms
        return until_ms < now_ms


class _Asked(msgspec.Struct, frozen=True):
    """A request, as it is written."""

    verb: str
    tables: tuple[str, ...] = ()
    keep_target: bool = False
    until_ms: int | None = None


def ask(
    blob: Blob,
    verb: str,
    tables: Sequence[str] = (),
    *,
    keep_target: bool = False,
    clock: Clock,
    chance: random.Random,
    patience_ms: int,
    owner_is_dead: Callable[[], bool] = lambda: False,
) -> Mapping[str, Any]:
    """Ask, and wait for the answer. Whatever ends the waiting, the request does not stay.

    Raises:
        OwnerDied: the owner died and had not answered; the request is withdrawn.
        UsageError: nobody answered in time; the request is withdrawn.
    """
    asked_ms = clock.now_ms()
    id = f"{asked_ms:013d}-{chance.getrandbits(32):08x}"
    said = {
        "verb": verb,
        "tables": [*tables],
        "keep_target": keep_target,
        "asked_ms": asked_ms,
        "until_ms": asked_ms + patience_ms,
    }
    until = clock.boot_ms() + patience_ms
    never = threading.Event()
    dead = withdrawn = False
    try:
        blob.put(ASKS + id, msgspec.json.encode(said))
        while True:
            found = blob.get(ANSWERS + id)
            if found is not None:
                blob.delete(ANSWERS + id)
                told: Mapping[str, Any] = msgspec.json.decode(found)
                return told
            if withdrawn:
                break
            dead = owner_is_dead()
            if clock.boot_ms() < until and not dead:
                clock.wait(never, LOOK_MS)
            else:
                # Then one more look: it may have been answered just before.
                blob.delete(ASKS + id)
                withdrawn = True
    except BaseException:
        # If the store is away it ends by its time; what happened is what must be heard of.
        with suppress(StoreError):
            blob.delete(ASKS + id)
        raise
    if dead:
        raise OwnerDied(verb)
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
            asked = Request(id, said.verb, said.tables, said.keep_target, said.until_ms)
            if asked.is_late(now_ms):
                late = UsageError(
                    f'request "{id}" came too late',
                    detail="By its owner's clock nobody waits for it any more.",
                    hint="Ask again; if that is told at once, compare the clocks of both hosts.",
                )
                answer(blob, asked, error=late)
            else:
                found.append(asked)
    return found


def is_pending(blob: Blob, request: Request, *, now_ms: int) -> bool:
    """Whether whoever asked waits for it still; for who comes to it long after it was heard."""
    return not request.is_late(now_ms) and blob.get(ASKS + request.id) is not None


def answer(
    blob: Blob,
    request: Request,
    *,
    left: Mapping[str, str] | None = None,
    mended: int | None = None,
    error: PenstockError | None = None,
) -> None:
    """Say that it was done, but for the tables `left` as they are; or why not.

    `mended` is how many rows had to go or come. Nothing is said to who does not wait any more.
    """
    if blob.get(ASKS + request.id) is None:
        return
    said: dict[str, Any]
    if error is not None:
        said = {"done": False, "error": str(error), "detail": error.detail, "hint": error.hint}
    else:
        said = {"done": True, "left": dict(left or {})}
        if mended is not None:
            said["mended"] = mended
    blob.put(ANSWERS + request.id, msgspec.json.encode(said))
    blob.delete(ASKS + request.id)


def forget_old_answers(blob: Blob, *, now_ms: int) -> None:
    """Remove answers that nobody has come for."""
    for each in blob.list(ANSWERS):
        named = ID.fullmatch(each.key.removeprefix(ANSWERS))
        if named is None or int(named[1]) < now_ms - OLD_MS:
            blob.delete(each.key)
