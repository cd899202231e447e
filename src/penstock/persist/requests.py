"""Requests to the running owner of a storage location, and its responses.

A client without the lock must not write the log. A request is therefore an object
next to the log. The owner lists these objects every second, executes them and
creates a response object, which the client deletes. A client that stops waiting
deletes its request, and gets no response; if both happen at once, the owner deletes
the response after an hour. A killed client deletes nothing, so a request carries its
deadline.

    asks/ID         {"verb": "resync", "tables": […], "keep_target": false,
                     "asked_ms": …, "until_ms": …}
    answers/ID      {"done": true, "left": {TABLE: WHY}, "mended": …}
                    or {"done": false, "error": …}

An ID begins with the time of the request, in milliseconds.
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
    "forget_old_answers",
    "is_pending",
    "requests",
    "send_request",
]

log = logger("persist")

ASKS: Final = "asks/"
ANSWERS: Final = "answers/"
ID: Final = re.compile(r"([0-9]{13})-[0-9a-f]{8}")
LOOK_MS: Final = 200
OLD_MS: Final = 3_600_000
"""Age after which a request or response has no waiting client."""

UNSAID_MS: Final = 600_000
"""Deadline of requests of older versions, which carry none."""


class OwnerDied(UsageError):
    """The owner of a storage location died before it answered a request."""

    def __init__(self, verb: str) -> None:
        super().__init__(
            f"owner died before it responded to a request to {verb}",
            detail="The request was withdrawn. Parts of it may have been executed.",
            hint="Start the owner again: penstock up FILE. Then repeat the request.",
        )


@dataclass(frozen=True, slots=True)
class Request:
    """A command for the owner of a storage location."""

    id: str
    verb: str
    tables: tuple[str, ...] = ()
    keep_target: bool = False
    """For a materialization that is dropped: whether the resources it created stay."""

    until_ms: int | None = None
    """Deadline of the client, by its own clock; None in requests of older versions."""

    def is_late(self, now_ms: int) -> bool:
        """Return whether no client can be waiting for the response."""
        named = ID.fullmatch(self.id)
        if named is None or int(named[1]) < now_ms - OLD_MS:
            return True
        until_ms = int(named[1]) + UNSAID_MS if self.until_ms is None else self.until_ms
        return until_ms < now_ms


class _StoredRequest(msgspec.Struct, frozen=True):
    """Stored form of a request."""

    verb: str
    tables: tuple[str, ...] = ()
    keep_target: bool = False
    until_ms: int | None = None


def send_request(
    blob: Blob,
    verb: str,
    tables: Sequence[str] = (),
    *,
    keep_target: bool = False,
    clock: Clock,
    rng: random.Random,
    patience_ms: int,
    owner_is_dead: Callable[[], bool] = lambda: False,
) -> Mapping[str, Any]:
    """Send a request and wait for the response. The request is deleted however the wait ends.

    Raises:
        OwnerDied: the owner died before it responded.
        UsageError: the owner did not respond in time.
    """
    asked_ms = clock.now_ms()
    id = f"{asked_ms:013d}-{rng.getrandbits(32):08x}"
    body = {
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
        blob.put(ASKS + id, msgspec.json.encode(body))
        while True:
            data = blob.get(ANSWERS + id)
            if data is not None:
                blob.delete(ANSWERS + id)
                response: Mapping[str, Any] = msgspec.json.decode(data)
                return response
            if withdrawn:
                break
            dead = owner_is_dead()
            if clock.boot_ms() < until and not dead:
                clock.wait(never, LOOK_MS)
            else:
                # Check once more: the response may have been created just before.
                blob.delete(ASKS + id)
                withdrawn = True
    except BaseException:
        # If the store is unavailable, the deadline ends the request. The first error is raised.
        with suppress(StoreError):
            blob.delete(ASKS + id)
        raise
    if dead:
        raise OwnerDied(verb)
    raise UsageError(
        f"owner did not respond to a request to {verb} within {patience_ms // 1_000} s",
        detail="The request was withdrawn. If the owner had started it, it continues.",
        hint="Show the state of the owner: penstock status LOCATION. "
        "If it is not running, start it: penstock up FILE",
    )


def requests(blob: Blob, *, now_ms: int) -> list[Request]:
    """Return the pending requests, oldest first.

    Malformed requests, and requests whose deadline has passed, are answered with an error: a
    drop must not run days after it was requested.
    """
    pending = []
    for listed_object in sorted(blob.list(ASKS), key=lambda listed: listed.key):
        id, data = listed_object.key.removeprefix(ASKS), blob.get(listed_object.key)
        if not id or data is None:
            continue
        try:
            body = msgspec.json.decode(data, type=_StoredRequest)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            log.warning(
                "malformed request removed",
                extra=fields(object=listed_object.key, error=str(error)),
            )
            malformed = UsageError(
                f'request "{id}" is malformed',
                detail=f"{error}.",
                hint="Send requests with the command line: penstock resync LOCATION SOURCE",
            )
            answer(blob, Request(id, ""), error=malformed)
        else:
            request = Request(id, body.verb, body.tables, body.keep_target, body.until_ms)
            if request.is_late(now_ms):
                late = UsageError(
                    f'request "{id}" is past its deadline',
                    detail="By the clock of the owner, the client no longer waits for a response.",
                    hint="Repeat the request. Compare the clocks of both hosts.",
                )
                answer(blob, request, error=late)
            else:
                pending.append(request)
    return pending


def is_pending(blob: Blob, request: Request, *, now_ms: int) -> bool:
    """Return whether the client still waits for the response."""
    return not request.is_late(now_ms) and blob.get(ASKS + request.id) is not None


def answer(
    blob: Blob,
    request: Request,
    *,
    left: Mapping[str, str] | None = None,
    corrected_rows: int | None = None,
    error: PenstockError | None = None,
) -> None:
    """Respond that the request was executed, except for the tables `left`, or with `error`.

    `corrected_rows` is the number of rows that a resync changed. A withdrawn request gets
    no response.
    """
    if blob.get(ASKS + request.id) is None:
        return
    body: dict[str, Any]
    if error is not None:
        body = {"done": False, "error": str(error), "detail": error.detail, "hint": error.hint}
    else:
        body = {"done": True, "left": dict(left or {})}
        if corrected_rows is not None:
            body["mended"] = corrected_rows
    blob.put(ANSWERS + request.id, msgspec.json.encode(body))
    blob.delete(ASKS + request.id)


def forget_old_answers(blob: Blob, *, now_ms: int) -> None:
    """Delete responses whose client never read them."""
    for listed_object in blob.list(ANSWERS):
        named = ID.fullmatch(listed_object.key.removeprefix(ANSWERS))
        if named is None or int(named[1]) < now_ms - OLD_MS:
            blob.delete(listed_object.key)
