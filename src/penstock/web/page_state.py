"""State of the status page, computed from the lake and the status of running tasks. Pure.

The status of a task in this process is newer than its state in the lake, and takes precedence. A
task that does not run in this process may run in another: a storage location with a live writer is
running.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from penstock.errors import PenstockError
from penstock.persist.state import END
from penstock.progress.time import describe_time

__all__ = ["degraded", "state_of", "told", "unhealthy", "waited_for"]

Found = Mapping[str, Any]
"""Storage location, as returned by `penstock.catalog.inspect`."""

DELIVERING: Final = ("following", "storing", "degraded")
LAGS: Final = ("lag_ms", "lag_bytes", "lag_records")


def state_of(
    found: Sequence[Found],
    running: Mapping[str, Mapping[str, Any]],
    failed: Mapping[str, PenstockError],
    now_ms: int,
) -> dict[str, Any]:
    """Return sources, collections, materializations and errors.

    `failed` contains the locations that could not be read.
    """
    sources = _tasks(found, running, "source")
    materializations = _tasks(found, running, "materialization")
    collections = [_collection(each, where) for where in found for each in where["collections"]]
    uppers = {each["name"]: each["upper"] for each in collections}
    for each in sources:
        if each["state"] != "running" or each.get("connected") is False:
            # Without a connection the upstream position, and so the lag, is not known.
            each |= {key: None for key in LAGS if key in each or key == "lag_ms"}
        elif each["lag_ms"] is None and each.get("as_of") is not None:
            each["lag_ms"] = max(0, now_ms - each["as_of"])
    for each in materializations:
        # On the page, `transactions` is a list.
        each["transactions_total"] = each.pop("transactions", 0)
        each["lag_ms"] = _lag_ms(each, uppers)
    unread = [{"object": f'location "{url}"', **told(error)} for url, error in failed.items()]
    full = [
        {"object": f'disk of location "{where["location"]}"', **where["disk_error"]}
        for where in found
        if where["disk_error"]
    ]
    return {
        "now_ms": now_ms,
        "sources": sources,
        "collections": collections,
        "materializations": materializations,
        "errors": [*unread, *full, *_errors(sources, collections, materializations)],
    }


def unhealthy(running: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the tasks that ended with an error and will not restart."""
    return [
        name
        for name, task in running.items()
        if task.get("state") in ("stopped", "ended") and task.get("error")
    ]


def waited_for(state: Mapping[str, Any]) -> list[str]:
    """Return the outstanding conditions of readiness; empty if everything is ready.

    Paused tasks are ignored.
    """
    waits = [
        f"{error['object']}: {error['message']}"
        for error in state["errors"]
        if error["object"].startswith("location ")
    ]
    for each in state["sources"]:
        name = f'source "{each["name"]}"'
        copying = [
            table["name"]
            for table in each.get("tables", ())
            if table["phase"] not in ("live", "errored")
        ]
        if each["state"] == "paused":
            continue
        if each["state"] != "running":
            waits.append(f"{name} to run; it is {_state_and_reason(each)}")
        elif each.get("connected") is False:
            waits.append(f"{name} to connect: {each.get('disconnected_reason') or 'no reason'}")
        elif each.get("as_of") is None:
            waits.append(f"{name} to begin; it is {each.get('phase') or 'starting'}")
        elif copying:
            waits.append(f"{name} to copy {', '.join(copying)}")
    for each in state["materializations"]:
        name = f'materialization "{each["name"]}"'
        if each["state"] == "paused":
            continue
        if each["state"] != "running":
            waits.append(f"{name} to run; it is {_state_and_reason(each)}")
        elif each.get("phase") not in DELIVERING or not each.get("upper"):
            waits.append(f"{name} to follow; it is {each.get('phase') or 'starting'}")
    return waits


def _state_and_reason(task: Mapping[str, Any]) -> str:
    error = task["error"]
    return f"{task['state']}: {error['message']}" if error else str(task["state"])


def degraded(state: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the frozen bindings: materialization, collection, error time, error and remedy."""
    return [
        {"materialization": each["name"], **frozen}
        for each in state["materializations"]
        for frozen in each.get("degraded") or ()
    ]


def told(error: PenstockError) -> dict[str, str]:
    """Return an error as a JSON object."""
    return {"message": str(error), "detail": error.detail, "hint": error.hint}


def _tasks(
    found: Sequence[Found], running: Mapping[str, Mapping[str, Any]], kind: str
) -> list[dict[str, Any]]:
    tasks: dict[str, dict[str, Any]] = {}
    for where in found:
        for noted in where[f"{kind}s"]:
            said = dict(noted)
            name = said.pop(kind)
            writer = where["writer"]
            runs = writer is not None and writer["lives"] and said.get("phase") != "stopped"
            tasks[name] = {
                "name": name,
                **said,
                "state": "running" if runs else "stopped",
                "restarts": 0,
                "error": _error(said.get("error")),
                "location": where["location"],
            }
    for name, live in running.items():
        if live["kind"] == kind:
            noted = tasks.get(name, {"name": name, "location": None})
            tasks[name] = {
                **noted,
                # For a source, keep the kind of its connector, such as postgres.
                **{key: value for key, value in live.items() if key != "kind"},
                "lag_ms": noted.get("lag_ms"),
                "error": _error(live.get("error")),
            }
    return [tasks[name] for name in sorted(tasks)]


def _collection(found: Mapping[str, Any], where: Found) -> dict[str, Any]:
    name = found["name"]
    return {
        **found,
        "source": found["owner"],
        "location": where["location"],
        "holds": [
            {"since": hold["sinces"][name], **{key: hold[key] for key in HOLD}}
            for hold in where["holds"]
            if name in hold["sinces"]
        ],
    }


HOLD: Final = ("owner", "kind", "age_ms", "unchanged_ms")


def _lag_ms(materialization: Mapping[str, Any], uppers: Mapping[str, int]) -> int | None:
    """Return the lag behind the collections; None before the first transaction.

    The lag in the status is from the last inspection by the materialization, which may be old.
    """
    upper: int = materialization.get("upper") or 0
    if not upper:
        return None
    told: int = materialization.get("lag_ms") or 0
    behind = materialization.get("left_behind") or ()
    reached = [
        uppers[name]
        for binding in materialization.get("bindings", ())
        if (name := binding["collection"]) in uppers and name not in behind and uppers[name] < END
    ]
    return max([told, min(reached) - upper] if reached else [told])


def _error(error: Any) -> dict[str, str] | None:
    if isinstance(error, str) and error:
        return {"message": error, "detail": "", "hint": ""}
    return dict(error) if error else None


def _errors(
    sources: Sequence[Mapping[str, Any]],
    collections: Sequence[Mapping[str, Any]],
    materializations: Sequence[Mapping[str, Any]],
) -> Iterator[dict[str, Any]]:
    errored = {each["name"] for each in collections if each["error"]}
    for kind, objects in (
        ("source", sources),
        ("collection", collections),
        ("materialization", materializations),
    ):
        for each in objects:
            if each["error"]:
                yield _told(f'{kind} "{each["name"]}"', kind, each, each["error"])
    for each in materializations:
        for frozen in each.get("degraded") or ():
            time = describe_time(frozen["time"])
            what = f'bindings to collection "{frozen["collection"]}" are frozen at {time}'
            error = {**frozen, "message": f"{what}: {frozen['message']}"}
            yield _told(f'materialization "{each["name"]}"', "materialization", each, error)
    for each in sources:
        for table in each.get("tables", ()):
            if table["error"] and table["collection"] not in errored:
                named = f'table "{table["name"]}" of source "{each["name"]}"'
                error = {"message": table["error"]}
                # A status written by an earlier release has only the message.
                error |= {key: table.get(f"error_{key}") for key in ("detail", "hint")}
                yield _told(named, "source", each, error)
        if each.get("slot_warning"):
            named = f'slot "{each["slot"]}" of source "{each["name"]}"'
            yield _told(named, "source", each, {"message": each["slot_warning"]})


def _told(named: str, kind: str, of: Mapping[str, Any], error: Mapping[str, Any]) -> dict[str, Any]:
    """Return an error with the object on the page that it belongs to."""
    said = {key: error.get(key) or "" for key in ("message", "detail", "hint")}
    return {"object": named, "kind": kind, "name": of["name"], **said}
