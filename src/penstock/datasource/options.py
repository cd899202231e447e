"""What a reading may be told, in words, as Spark's options are.

An option that is not known is refused by name: one that is misspelt would
otherwise do nothing, and nobody would learn of it.

Spark asks a source for its schema without saying whether it will be read once
or followed. So the options must: `startAt` belongs to a stream and is required
there, `asOf` to a batch.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from penstock.errors import UsageError

__all__ = ["BatchOptions", "StreamOptions", "WriteOptions", "parse", "parse_writing"]

_UNITS_MS: Final = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}

TASK_BYTES: Final = 1 << 30

_COMMON: Final = ("location", "collection", "hold")
_BATCH: Final = ("asOf", "holdFor", "maxTaskBytes")
_STREAM: Final = ("startAt", "snapshot", "progress", "maxRowsPerTrigger", "maxTaskBytes")
_WRITE: Final = ("key", "lockTimeout")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOptions:
    """How to read the contents as of a time."""

    location: str
    collection: str
    as_of: str = "latest"
    hold: bool = True
    hold_for_ms: int = 3_600_000
    """How long the history that is read is kept for the tasks; nobody renews it."""

    max_task_bytes: int = TASK_BYTES
    """How much a task may have to add up in memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOptions:
    """How to follow the changes from a time on."""

    location: str
    collection: str
    start_at: str
    snapshot: bool = True
    """Whether the contents as of `start_at` come first."""

    progress: bool = False
    """Whether each batch ends with a row that says how far it has come."""

    max_rows: int | None = None
    hold: bool = True
    owner: str | None = None
    """Of the durable hold; without one, history is kept while the query runs."""

    max_task_bytes: int = TASK_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteOptions:
    """Where rows are appended."""

    location: str
    collection: str
    key: tuple[str, ...] = ()
    """The columns that identify a row of a new collection."""

    lock_timeout_ms: int = 600_000
    """How long to wait for another writer."""


def parse_writing(options: Mapping[str, str]) -> WriteOptions:
    """The options of a write as values.

    Raises:
        UsageError: one is missing, not known or not understood.
    """
    given = _named_once(options)
    _refuse_unknown(given, (*_COMMON[:2], *_WRITE))
    location, collection = _target(given)
    return WriteOptions(
        location=location,
        collection=collection,
        key=tuple(name.strip() for name in given.get("key", "").split(",") if name.strip()),
        lock_timeout_ms=_duration_ms(given.get("locktimeout", "10m"), "lockTimeout"),
    )


def parse(options: Mapping[str, str]) -> BatchOptions | StreamOptions:
    """The options as values.

    Raises:
        UsageError: one is missing, not known or not understood.
    """
    given = _named_once(options)
    streamed = "startat" in given
    known = (*_COMMON, *(_STREAM if streamed else _BATCH))
    _check_known(given, known, streamed=streamed)
    location, collection = _target(given)
    max_task_bytes = _number(given, "maxTaskBytes", TASK_BYTES)
    if not streamed:
        return BatchOptions(
            location=location,
            collection=collection,
            as_of=given.get("asof", "latest"),
            hold=_truth(given, "hold"),
            hold_for_ms=_duration_ms(given.get("holdfor", "1h"), "holdFor"),
            max_task_bytes=max_task_bytes,
        )
    hold = given.get("hold", "true")
    named = hold.lower() not in ("true", "false")
    return StreamOptions(
        location=location,
        collection=collection,
        start_at=given["startat"],
        snapshot=_truth(given, "snapshot"),
        progress=_truth(given, "progress", default="false"),
        max_rows=_number(given, "maxRowsPerTrigger", 0) or None,
        hold=hold.lower() != "false",
        owner=hold if named else None,
        max_task_bytes=max_task_bytes,
    )


def _named_once(options: Mapping[str, str]) -> dict[str, str]:
    """The options in lower case, with the collection under its own name."""
    given = {name.lower(): value for name, value in options.items()}
    if "path" in given:
        if "collection" in given and given["collection"] != given["path"]:
            raise UsageError(
                f'two collections are named: "{given["path"]}" and "{given["collection"]}"',
                hint="Name it once: in load(…) or save(…), or in the option collection.",
            )
        given["collection"] = given.pop("path")
    return given


def _target(given: Mapping[str, str]) -> tuple[str, str]:
    return (
        _required(given, "location", hint="Give the URL of a lake or a storage location."),
        _required(
            given, "collection", hint="Name it in load(…) or save(…), or in the option collection."
        ),
    )


def _refuse_unknown(given: Mapping[str, str], known: tuple[str, ...]) -> None:
    unknown = sorted(set(given) - {name.lower() for name in known})
    if unknown:
        raise UsageError(
            f'format "penstock" has no option "{unknown[0]}"',
            hint=f"It has {', '.join(known)}.",
        )


def _check_known(given: Mapping[str, str], known: tuple[str, ...], *, streamed: bool) -> None:
    unknown = sorted(set(given) - {name.lower() for name in known})
    if not unknown:
        return
    name = unknown[0]
    other = _BATCH if streamed else _STREAM
    meant = {each.lower(): each for each in other}.get(name)
    if meant is None:
        _refuse_unknown(given, known)
    if streamed:
        raise UsageError(
            f'option "{meant}" does not go together with "startAt"',
            hint="asOf and holdFor are for spark.read, startAt is for spark.readStream.",
        )
    raise UsageError(
        f'option "{meant}" needs "startAt"',
        hint="It is for spark.readStream, which begins at startAt: latest, earliest or a time.",
    )


def _required(given: Mapping[str, str], name: str, *, hint: str) -> str:
    if not given.get(name):
        raise UsageError(f'format "penstock" needs option "{name}"', hint=hint)
    return given[name]


def _truth(given: Mapping[str, str], name: str, *, default: str = "true") -> bool:
    text = given.get(name, default).lower()
    if text not in ("true", "false"):
        raise UsageError(
            f'option "{name}" is "{text}"',
            hint="Give true or false."
            + (" A durable hold, by name, is for streams." if name == "hold" else ""),
        )
    return text == "true"


def _number(given: Mapping[str, str], name: str, default: int) -> int:
    text = given.get(name.lower())
    if text is None:
        return default
    if not text.isdecimal() or int(text) == 0:
        raise UsageError(f'option "{name}" is "{text}"', hint="Give a number from 1 on.")
    return int(text)


def _duration_ms(text: str, name: str) -> int:
    found = re.fullmatch(r"([0-9]+)(ms|s|m|h|d)", text)
    if found is None or int(found[1]) == 0:
        raise UsageError(f'option "{name}" is "{text}"', hint="Give a duration such as 30m or 2h.")
    return int(found[1]) * _UNITS_MS[found[2]]
