"""Scripts of tests/scripts/persist, run by real clients on a store in memory."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any, Final

import pyarrow as pa
import pytest
from tests.datadriven import Directive
from tests.fix_scripts import stories
from tests.persist.shop import by_hand

import penstock.persist as persist
from penstock.errors import PenstockError
from penstock.persist import (
    END,
    Allowed,
    Appended,
    Client,
    Listener,
    Snapshot,
    UpperMismatch,
    UserCodec,
)

_numbers: Final = count()

TYPES: Final = {
    "text": pa.string(),
    "int32": pa.int32(),
    "int64": pa.int64(),
    "double": pa.float64(),
}

BUILT_IN: Final = {
    codec.name: codec
    for codec in (
        persist.TEXT,
        persist.BYTES,
        persist.INT64,
        persist.BIGINT,
        persist.JSON,
        persist.UNIT,
    )
}


class Shop:
    """Clients by name, on one location; each directive prints the result of a call."""

    def __init__(self) -> None:
        self.url = f"memory:script-{next(_numbers)}"
        self.settings = by_hand()
        self.clients: dict[str, Client] = {}
        self.listeners: dict[str, Listener] = {}
        self.holds: dict[str, Any] = {}

    def obey(self, directive: Directive) -> str:
        """Execute a directive; return its result or its error as text."""
        verb: Callable[[Directive], str] = getattr(self, f"do_{directive.name}")
        try:
            return verb(directive).replace(self.url, "LOCATION")
        except PenstockError as error:
            return describe_error(error).replace(self.url, "LOCATION")

    def finish(self) -> None:
        for client in self.clients.values():
            with_errors(client.close)

    # Who is there.

    def do_open(self, d: Directive) -> str:
        """open client=a [writer=id] [hold=no]"""
        client = persist.open(
            self.url,
            writer=d.args.get("writer"),
            hold=d.args.get("hold") != "no",
            settings=self.settings,
        )
        self.clients[d.args["client"]] = client
        return "reading" if client.epoch is None else f"writing in epoch {client.epoch}"

    def do_close(self, d: Directive) -> str:
        self.clients[d.args["client"]].close()
        return "closed"

    def do_release(self, _: Directive) -> str:
        holder = persist.release(self.url, settings=self.settings)
        return "nobody held it" if holder is None else f"released {holder.id}"

    # Listings.

    def do_create(self, d: Directive) -> str:
        """create name=x key=text value=unit, or name=x columns=k:text,n:int32 key=k"""
        client, name = self.client(d), d.args["name"]
        if "columns" in d.args:
            found = client.create_or_load(
                name, schema=schema(d.args["columns"]), key_columns=[d.args.get("key", "k")]
            )
        else:
            found = client.create_or_load(
                name, key=codec(d.args.get("key", "text")), value=codec(d.args.get("value", "unit"))
            )
        return f"collection {found.id} since={found.since} upper={found.upper}"

    def do_alter(self, d: Directive) -> str:
        defaults = dict(word.split(":") for word in d.args.get("defaults", "").split(",") if word)
        values = {name: int(v) if v.isdigit() else v for name, v in defaults.items()}
        self.collection(d).alter(schema(d.args["columns"]), defaults=values)
        return "altered"

    def do_destroy(self, d: Directive) -> str:
        return "destroyed" if self.client(d).destroy(d.args["name"]) else "was not there"

    def do_list(self, d: Directive) -> str:
        return "\n".join(self.client(d).collections()) or "none"

    # Writing.

    def do_append(self, d: Directive) -> str:
        collection = self.collection(d)
        return describe(
            collection.compare_and_append(
                updates(collection, d.input),
                frontier(d.args["expected"]),
                frontier(d.args["upper"]),
            )
        )

    def do_append_all(self, d: Directive) -> str:
        """Each line: name expected upper, then its updates separated by commas."""
        appends = []
        for line in d.input:
            name, expected, upper, *rest = line.split(" ", 3)
            collection = self.client(d).collection(name)
            given = [word.strip() for word in rest[0].split(",")] if rest else []
            appends.append(
                persist.AppendTo(collection, updates(collection, given), int(expected), int(upper))
            )
        return describe(self.client(d).append_all(appends))

    def do_write(self, d: Directive) -> str:
        collection = self.collection(d)
        return describe(collection.write(updates(collection, d.input)).result())

    def do_seal(self, d: Directive) -> str:
        return describe(self.collection(d).seal(frontier(d.args["upper"])).result())

    def do_queue(self, d: Directive) -> str:
        """Calls that stand in the queue together: `write k 3 +1` or `seal 5`, one a line."""
        collection = self.collection(d)
        with gate(self.client(d)):
            futures = []
            for line in d.input:
                verb, _, rest = line.partition(" ")
                if verb == "seal":
                    futures.append(collection.seal(int(rest)))
                else:
                    futures.append(collection.write(updates(collection, [rest])))
        errors = [future.exception() for future in futures]
        return "\n".join(
            f"{type(e).__name__}: {e}" if e else describe(f.result())
            for e, f in zip(errors, futures, strict=True)
        )

    def do_close_while_queued(self, d: Directive) -> str:
        """Close while a write stands in the queue; it was accepted, so it is done."""
        collection, client = self.collection(d), self.client(d)
        with gate(client):
            accepted = collection.write(updates(collection, d.input))
        client.close()
        return f"{describe(accepted.result())}\nclosed"

    def do_unsealed(self, d: Directive) -> str:
        found = self.client(d).unsealed()
        return (
            "\n".join(f"{u.collection}: {u.updates} in [{u.lower}, {u.upper})" for u in found)
            or "none"
        )

    def do_discard(self, d: Directive) -> str:
        self.client(d).discard_unsealed([d.args["name"]] if "name" in d.args else None)
        return "discarded"

    # Forgetting.

    def do_allow(self, d: Directive) -> str:
        return describe(self.collection(d).allow_compaction(frontier(d.args["since"])).result())

    def do_compact(self, d: Directive) -> str:
        self.client(d).compact()
        return (
            f"{len(self.collection(d).state.batches)} batches" if "name" in d.args else "compacted"
        )

    def do_hold(self, d: Directive) -> str:
        """hold as=h1 owner=mat [name=x since=3]"""
        handle = d.args["as"]
        if handle not in self.holds:
            self.holds[handle] = self.client(d).hold(d.args["owner"])
        if "name" in d.args:
            self.holds[handle].move({d.args["name"]: int(d.args["since"])})
        hold = self.holds[handle]
        held = ", ".join(f"{name} from {since}" for name, since in hold.sinces().items())
        return f"token {hold.token}: {held or 'nothing'}"

    def do_drop_hold(self, d: Directive) -> str:
        self.holds[d.args["as"]].drop()
        return "dropped"

    # Reading.

    def do_bounds(self, d: Directive) -> str:
        collection = self.collection(d)
        return f"[{describe_time(collection.since)}, {describe_time(collection.upper)})"

    def do_snapshot(self, d: Directive) -> str:
        return lines(self.collection(d).snapshot(int(d.args["as_of"])))

    def do_listen(self, d: Directive) -> str:
        self.listeners[d.args["as"]] = self.collection(d).listen(int(d.args["as_of"]))
        return "listening"

    def do_next(self, d: Directive) -> str:
        changes = self.listeners[d.args["as"]].next_changes(timeout_ms=0)
        if changes is None:
            return "nothing new"
        assert not isinstance(changes, Snapshot)
        found = lines(changes)
        return f"[{changes.lower}, {changes.upper})" + ("" if found == "nothing" else f"\n{found}")

    def client(self, d: Directive) -> Client:
        return self.clients[d.args.get("client", next(iter(self.clients)))]

    def collection(self, d: Directive) -> persist.Collection:
        """Loaded with codecs if the directive names them, else as it is."""
        if "key" in d.args:
            return self.client(d).create_or_load(
                d.args["name"], key=codec(d.args["key"]), value=codec(d.args.get("value", "unit"))
            )
        return self.client(d).collection(d.args["name"])


@contextmanager
def gate(client: Client) -> Iterator[None]:
    """Block commits inside the block; all calls are queued together."""
    with client._machine._advancing:
        yield


def with_errors(act: Callable[[], None]) -> str:
    try:
        act()
    except PenstockError as error:
        return describe_error(error)
    return ""


def describe_error(error: PenstockError) -> str:
    kind = type(error).__name__
    # Process and time differ between runs.
    detail = re.sub(r'process \d+ on (host )?"[^"]*"', "process PID on HOST", error.detail)
    lines = [
        f"{kind}: {error}",
        detail and f"detail: {detail}",
        error.hint and f"hint: {error.hint}",
    ]
    return "\n".join(filter(None, lines))


def describe(outcome: Any) -> str:
    match outcome:
        case Appended(upper=upper):
            return f"appended upper={describe_time(upper)}"
        case UpperMismatch(collection=name, current=current):
            return f"mismatch {name} upper={describe_time(current)}"
        case Allowed(since=since):
            return f"allowed since={describe_time(since)}"
        case _:
            raise AssertionError(outcome)


def lines(read: Any) -> str:
    found = []
    for update in read:
        data = update.data
        if isinstance(data, tuple):
            words = [str(word) for word in data if word is not None]
        else:
            words = [f"{name}={value}" for name, value in data.items()]
        found.append(f"{' '.join(words)} {describe_time(update.time)} {update.diff:+d}")
    return "\n".join(sorted(found)) or "nothing"


def updates(collection: persist.Collection, given: Any) -> list[Any]:
    """`k [v] time diff` for keys and values, `k=x n=1 time diff` for rows."""
    found: list[Any] = []
    for line in given:
        *words, time, diff = line.split()
        if words and "=" in words[0]:
            row: dict[str, Any] = {}
            for word in words:
                name, _, value = word.partition("=")
                row[name] = int(value) if value.isdigit() else value
            found.append((row, int(time), int(diff)))
        else:
            found.append(((words[0], words[1] if words[1:] else None), int(time), int(diff)))
    return found


def schema(text: str) -> pa.Schema:
    fields = []
    for word in text.split(","):
        name, _, kind = word.partition(":")
        fields.append(pa.field(name, TYPES[kind.rstrip("!")], nullable=not kind.endswith("!")))
    return pa.schema(fields)


def codec(word: str) -> Any:
    """Return a built-in codec, or `shout@2`: a user codec that marks its values."""
    name, at, version = word.partition("@")
    if not at:
        return BUILT_IN[name]
    number = int(version)
    return UserCodec(
        name,
        number,
        lambda value: f"v{number}/{value}".encode(),
        lambda stored, wrote: stored.decode().removeprefix(f"v{wrote}/"),
    )


def frontier(word: str) -> int:
    return END if word == "end" else int(word)


def describe_time(time: int) -> str:
    return "end" if time == END else str(time)


@pytest.mark.parametrize("path", stories("persist"), ids=lambda path: path.stem)
def test_script(path, script):
    shop = Shop()
    try:
        script(path, shop.obey)
    finally:
        shop.finish()
