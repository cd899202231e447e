"""Options of the format.

An option that does not exist is rejected by name: a misspelt option would otherwise have no
effect.

Spark requests the schema of a source without stating whether it is read once or streamed.
The options decide: `startAt` belongs to a stream and is required there, `asOf` to a batch.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from penstock.errors import UsageError

__all__ = [
    "BatchOptions",
    "StreamOptions",
    "WriteOptions",
    "parse_read_options",
    "parse_write_options",
]

_UNITS_MS: Final = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}

TASK_BYTES: Final = 1 << 30

_COMMON: Final = ("location", "collection", "hold")
_BATCH: Final = ("asOf", "holdFor", "maxTaskBytes")
_STREAM: Final = ("startAt", "snapshot", "progress", "maxRowsPerTrigger", "maxTaskBytes")
_WRITE: Final = ("key", "lockTimeout")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOptions:
    """Options of a batch read: the contents as of a time."""

    location: str
    collection: str
    as_of: str = "latest"
    hold: bool = True
    hold_for_ms: int = 3_600_000
    """Lifetime of the hold for the tasks; it is not renewed."""

    max_task_bytes: int = TASK_BYTES
    """Limit of the memory that one task needs to consolidate updates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOptions:
    """Options of a stream: the changes from a time on."""

    location: str
    collection: str
    start_at: str
    snapshot: bool = True
    """Deliver the contents as of `start_at` first."""

    progress: bool = False
    """End each batch with a row that reports its progress."""

    max_rows: int | None = None
    hold: bool = True
    owner: str | None = None
    """Owner of the durable hold. Without it, history is retained only while the query runs."""

    max_task_bytes: int = TASK_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteOptions:
    """Options of a write, which appends rows."""

    location: str
    collection: str
    key: tuple[str, ...] = ()
    """Key columns of a new collection."""

    lock_timeout_ms: int = 600_000
    """Wait this long for the lock of another writer."""


def parse_write_options(options: Mapping[str, str]) -> WriteOptions:
    """Parse the options of a write.

    Raises:
        UsageError: An option is missing, does not exist or has an invalid value.
    """
    values = _normalize(options)
    _reject_unknown(values, (*_COMMON[:2], *_WRITE))
    location, collection = _location_and_collection(values)
    return WriteOptions(
        location=location,
        collection=collection,
        key=tuple(name.strip() for name in values.get("key", "").split(",") if name.strip()),
        lock_timeout_ms=_duration_ms(values.get("locktimeout", "10m"), "lockTimeout"),
    )


def parse_read_options(options: Mapping[str, str]) -> BatchOptions | StreamOptions:
    """Parse the options of a read.

    Raises:
        UsageError: An option is missing, does not exist or has an invalid value.
    """
    values = _normalize(options)
    is_stream = "startat" in values
    known = (*_COMMON, *(_STREAM if is_stream else _BATCH))
    _check_known(values, known, is_stream=is_stream)
    location, collection = _location_and_collection(values)
    max_task_bytes = _number(values, "maxTaskBytes", TASK_BYTES)
    if not is_stream:
        return BatchOptions(
            location=location,
            collection=collection,
            as_of=values.get("asof", "latest"),
            hold=_boolean(values, "hold"),
            hold_for_ms=_duration_ms(values.get("holdfor", "1h"), "holdFor"),
            max_task_bytes=max_task_bytes,
        )
    hold = values.get("hold", "true")
    named = hold.lower() not in ("true", "false")
    return StreamOptions(
        location=location,
        collection=collection,
        start_at=values["startat"],
        snapshot=_boolean(values, "snapshot"),
        progress=_boolean(values, "progress", default="false"),
        max_rows=_number(values, "maxRowsPerTrigger", 0) or None,
        hold=hold.lower() != "false",
        owner=hold if named else None,
        max_task_bytes=max_task_bytes,
    )


def _normalize(options: Mapping[str, str]) -> dict[str, str]:
    """Return the options by lower-case name, with `path` as the collection."""
    values = {name.lower(): value for name, value in options.items()}
    if "path" in values:
        if "collection" in values and values["collection"] != values["path"]:
            raise UsageError(
                f'two collections are named: "{values["path"]}" and "{values["collection"]}"',
                hint="Name one collection: in load(…) or save(…), or in the option collection.",
            )
        values["collection"] = values.pop("path")
    return values


def _location_and_collection(values: Mapping[str, str]) -> tuple[str, str]:
    return (
        _required(values, "location", hint="Set it to the URL of a lake or a storage location."),
        _required(
            values,
            "collection",
            hint="Name the collection in load(…) or save(…), or in the option collection.",
        ),
    )


def _reject_unknown(values: Mapping[str, str], known: tuple[str, ...]) -> None:
    unknown = sorted(set(values) - {name.lower() for name in known})
    if unknown:
        raise UsageError(
            f'format "penstock" has no option "{unknown[0]}"',
            hint=f"The options are {', '.join(known)}.",
        )


def _check_known(values: Mapping[str, str], known: tuple[str, ...], *, is_stream: bool) -> None:
    unknown = sorted(set(values) - {name.lower() for name in known})
    if not unknown:
        return
    name = unknown[0]
    other = _BATCH if is_stream else _STREAM
    option = {option_name.lower(): option_name for option_name in other}.get(name)
    if option is None:
        _reject_unknown(values, known)
    if is_stream:
        raise UsageError(
            f'option "{option}" cannot be combined with "startAt"',
            hint="asOf and holdFor are for spark.read, startAt is for spark.readStream.",
        )
    raise UsageError(
        f'option "{option}" requires "startAt"',
        hint="It belongs to spark.readStream, which starts at startAt: latest, earliest or a time.",
    )


def _required(values: Mapping[str, str], name: str, *, hint: str) -> str:
    if not values.get(name):
        raise UsageError(f'format "penstock" requires option "{name}"', hint=hint)
    return values[name]


def _boolean(values: Mapping[str, str], name: str, *, default: str = "true") -> bool:
    text = values.get(name, default).lower()
    if text not in ("true", "false"):
        raise UsageError(
            f'option "{name}" has the invalid value "{text}"',
            hint="Use true or false."
            + (" Only a stream can have a durable hold, by name." if name == "hold" else ""),
        )
    return text == "true"


def _number(values: Mapping[str, str], name: str, default: int) -> int:
    text = values.get(name.lower())
    if text is None:
        return default
    if not text.isdecimal() or int(text) == 0:
        raise UsageError(
            f'option "{name}" has the invalid value "{text}"', hint="Use an integer of at least 1."
        )
    return int(text)


def _duration_ms(text: str, name: str) -> int:
    match = re.fullmatch(r"([0-9]+)(ms|s|m|h|d)", text)
    if match is None or int(match[1]) == 0:
        raise UsageError(
            f'option "{name}" has the invalid value "{text}"',
            hint="Use a duration such as 30m or 2h.",
        )
    return int(match[1]) * _UNITS_MS[match[2]]
