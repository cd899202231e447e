"""Transactions stream of `plain.py`: message handlers with planted defects."""

import base64
import contextlib
import json
import queue
import secrets
import sqlite3
import threading
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from google.protobuf.message import DecodeError

from penstock.protocol._generated import materialize_pb2 as pb

if TYPE_CHECKING:
    from tests.conformance.plain_endpoint import PLAIN, PUSH, REMOTE, STAGED, Refused, table_of
else:  # In a script, its folder is on the path, and the project is not.
    from plain_endpoint import PLAIN, PUSH, REMOTE, STAGED, Refused, table_of

ZERO = bytes.fromhex("f8ffffff0f01")


class Borne(Exception):
    """Ignored protocol violation: the stream ends without an error."""


class Stream:
    def __init__(self, driver: Any, requests: Iterator[bytes]) -> None:
        self.driver = driver
        self.requests: queue.Queue[Any] = queue.Queue()
        self.over = threading.Event()
        self.last = ""
        self.bad = driver.bad
        self._connection: sqlite3.Connection | None = None
        self.loads: list[tuple[int, bytes]] = []
        self.stores: list[tuple[int, bytes, bytes, Any]] = []
        self.keys: dict[int, set[bytes]] = defaultdict(set)
        self.begun: set[int] = set()
        self.commits = 0
        self.late: Any = None
        threading.Thread(target=self._read, args=[requests], daemon=True).start()

    def _read(self, requests: Iterator[bytes]) -> None:
        try:
            for data in requests:
                self.requests.put(data)
            self.requests.put(None)
        except Exception:  # noqa: BLE001  (gRPC reports a cancelled stream this way)
            self.requests.put(ConnectionError("cancelled"))

    def run(self) -> Iterator[Any]:
        try:
            while True:
                data = self.requests.get()
                if isinstance(data, Exception):
                    raise data
                if data is None:
                    self._end()
                    return
                yield from self._step(data)
        except (Borne, ConnectionError):
            pass
        finally:
            if self.bad("commits-on-cancel") and self.stores:
                self._write(self.stores)
            if self._connection is not None:
                self._connection.close()
            self.over.set()
            if self in self.driver.streams:
                self.driver.streams.remove(self)

    def refuse(self, name: str, why: str) -> NoReturn:
        """Reject a message, unless a defect ignores the violation."""
        raise Borne if self.bad(f"bears-{name}") else Refused(why)

    def _end(self) -> None:
        if self.last in ("load", "store", "flush", "start_commit"):
            self.refuse(f"end-after-{self.last}", f"the stream ends after {self.last}")
        if self.bad("fails-at-the-end"):
            raise Refused("the stream ended")

    def _step(self, data: bytes) -> Iterator[Any]:
        request = pb.TransactionRequest()
        try:
            request.ParseFromString(data)
        except DecodeError:
            self.refuse("garbage", "not a message")
        kinds = [field.name for field, _ in request.ListFields()]
        if len(kinds) != 1:
            self.refuse(
                "request-with-two-fields" if kinds else "empty-request",
                f"{len(kinds)} fields are set",
            )
        (kind,) = kinds
        if (kind == "open") is not (self.last == ""):
            name = "second-open" if kind == "open" else "first-message-other-than-open"
            self.refuse(name, f"{kind} after {self.last or 'nothing'}")
        follows = {
            "open": ("",),
            "acknowledge": ("open", "start_commit"),
            "load": ("acknowledge", "load"),
            "flush": ("acknowledge", "load"),
            "store": ("flush", "store"),
            "start_commit": ("flush", "store"),
        }
        names = {
            "acknowledge": "second-acknowledge",
            "load": "load-after-flush",
            "flush": "flush-before-acknowledge",
            "store": "store-before-flush",
            "start_commit": "start-commit-before-flush",
        }
        if self.last not in follows[kind]:
            self.refuse(names[kind], f"{kind} after {self.last}")
        self.last = kind
        yield from getattr(self, f"_{kind}")(getattr(request, kind))

    @property
    def db(self) -> sqlite3.Connection:
        """Return the connection that Open made."""
        assert self._connection is not None
        return self._connection

    # Open.

    def _open(self, message: Any) -> Iterator[Any]:
        self.spec = message.materialization
        self.task = self.spec.materialization
        self.low, self.high = message.key_begin, message.key_end
        self.endpoint = self.driver.endpoint(self.spec.endpoint_spec_json)
        self.bad = self.endpoint.bad
        if not message.version:
            self.refuse("open-without-version", "Open has no version")
        if self.low > self.high:
            self.refuse("open-with-reversed-range", "the range is backwards")
        self.tables = [
            table_of(each.resource_spec_json, self.endpoint) for each in self.spec.bindings
        ]
        if self.bad("mixes-bindings"):
            self.tables = self.tables[:1] * len(self.tables)
        self.delta = [each.delta_updates for each in self.spec.bindings]
        self.state = json.loads(message.driver_checkpoint_json or b"{}")
        self.driver.take_over(self)
        if self.bad("keeps-the-lock"):
            self.driver.kept_lock.acquire(timeout=4)
        self._connection = self.endpoint.connect()
        had = self.db.execute("select version from applied where task = ?", [self.task]).fetchone()
        if had is None or message.version not in (had[0], ""):
            raise Refused(f"version {message.version} is not applied")
        if self.bad("forgets-on-open"):
            self.driver.empty(self.db, self.tables)
        if self.bad("acknowledges-first"):
            yield pb.TransactionResponse(acknowledged={})
        self.epoch = self.db.execute("insert into epochs (task) values (?)", [self.task]).lastrowid
        yield pb.TransactionResponse(opened={"runtime_checkpoint": self._fence()})

    def ends(self, older: "Stream") -> bool:
        """Return whether this stream ends an older stream."""
        if self.bad("lets-both-live"):
            return False
        if self.task != older.task:
            return self.bad("fences-other-tasks")
        if self.bad("fences-everyone"):
            return True
        if self.bad("fences-equal-ranges"):
            return (self.low, self.high) == (older.low, older.high)
        return self.low <= older.high and older.low <= self.high

    def _fence(self) -> bytes:
        if self.endpoint.mode != REMOTE:
            return b""
        own = [self.task, self.low, self.high]
        with self._transaction() as db:
            db.execute(
                "update fences set fence = fence + 1 where task = ? and high >= ? and low <= ?", own
            )
            inside = db.execute(
                "select checkpoint from fences where task = ? and low >= ? and high <= ?"
                " and not (low = ?2 and high = ?3)",
                own,
            ).fetchall()
            two_only = self.bad("joins-two") and len(inside) > 2
            if inside and not self.bad("resurrects") and not two_only:
                said = {each for (each,) in inside}
                found = said.pop() if len(said) == 1 else b""
                db.execute("delete from fences where task = ? and low >= ? and high <= ?", own)
                db.execute("insert into fences values (?, ?, ?, 1, ?)", [*own, found])
            row = db.execute(
                "select low, high, fence, checkpoint from fences where task = ? and low <= ?"
                " and high >= ? order by high - low"
                + (" desc limit 1" if self.bad("inherits-from-the-widest") else " limit 1"),
                own,
            ).fetchone()
            exact = row is not None and [*row[:2]] == own[1:]
            if row is not None and not exact and self.bad("inherits-nothing"):
                row = None
            self.fence: int
            checkpoint: bytes
            self.fence, checkpoint = (row[2], row[3]) if row else (1, ZERO)
            if not exact:
                db.execute(
                    "insert into fences values (?, ?, ?, ?, ?)", [*own, self.fence, checkpoint]
                )
        if self.bad("checkpoint-in-memory"):
            return self.driver.checkpoints.get(self.task, ZERO)
        if self.bad("checkpoint-is-text") and checkpoint != ZERO:
            return checkpoint.decode(errors="replace").encode()
        return checkpoint

    # Acknowledge.

    def _acknowledge(self, _message: Any) -> Iterator[Any]:
        if self.commits == 0 and self.bad("no-first-acknowledge"):
            return
        if self.endpoint.mode == STAGED and not (
            self.commits == 0 and self.bad("first-acknowledge-applies-nothing")
        ):
            if self.bad("stages-in-memory") and self.commits:
                path, content = self.unstaged
                path.write_text(content)
            self._apply_staged()
        if self.bad("opens-again") and self.commits == 2:
            yield pb.TransactionResponse(opened={})
        early = []
        if self.bad("loads-too-early") and self.commits > 1:
            with contextlib.suppress(queue.Empty):
                early.append(self.requests.get(timeout=5))
        for data in early:
            yield from self._step(data)
            yield from self._bring(self.loads)
            self.loads = []
        yield pb.TransactionResponse(acknowledged={})

    def _apply_staged(self) -> None:
        folder = self._folder()
        ids = list(self.state.values())
        if self.bad("applies-all-staged"):
            ids = [each.name for each in folder.iterdir()]
        for each in ids:
            path = folder / each
            if not path.exists():
                continue
            content = json.loads(path.read_text())
            with self._transaction() as db:
                if not self.bad("applies-twice"):
                    if db.execute("select 1 from done where id = ?", [each]).fetchone():
                        continue
                    db.execute("insert into done values (?)", [each])
                self._put(
                    [
                        (binding, base64.b64decode(key), doc.encode(), delete)
                        for binding, key, doc, delete in content
                    ]
                )

    def _folder(self) -> Path:
        name = base64.urlsafe_b64encode(self.task.encode()).decode()
        found = self.endpoint.path.parent / "staged" / name
        found.mkdir(parents=True, exist_ok=True)
        return found

    # Load.

    def _load(self, message: Any) -> Iterator[Any]:
        keys = self._slices(message.arena, message.packed_keys, "load")
        if not keys:
            self.refuse("load-without-keys", "Load has no keys")
        if message.binding >= len(self.tables):
            self.refuse("load-of-missing-binding", f"there is no binding {message.binding}")
        if self.bad("answers-the-last-load"):
            self.loads = []
        self.loads += [(message.binding, key) for key in keys]
        if self.bad("keeps-loads"):
            self.driver.kept_loads[self.task] += [(message.binding, key) for key in keys]
        if self.bad("load-removes"):
            for key in keys:
                self.db.execute(
                    "delete from rows where resource = ? and key = ?",
                    [self.tables[message.binding], key],
                )
        if self.bad("loads-while-committing"):
            yield from self._bring(self.loads)
            self.loads = []

    def _slices(self, arena: bytes, slices: Any, what: str) -> list[bytes]:
        found, at = [], 0
        for each in slices:
            begin, end = each.begin, each.end
            if begin > end:
                self.refuse(f"{what}-with-reversed-slice", "a slice is backwards")
            if end > len(arena):
                self.refuse(f"{what}-outside-arena", "a slice is outside of the arena")
            if self.bad("takes-slices-in-order"):
                begin, end = at, at + end - begin
                at = end
            found.append(arena[begin:end])
        return found

    def _flush(self, _message: Any) -> Iterator[Any]:
        loads, self.loads = self.loads, []
        if self.bad("keeps-loads"):
            loads = self.driver.kept_loads.pop(self.task, [])
        if self.bad("flush-removes"):
            for binding, key in loads:
                self.db.execute(
                    "delete from rows where resource = ? and key = ?", [self.tables[binding], key]
                )
        if (self.bad("flush-needs-loads") and not loads) or (
            self.bad("delta-needs-no-flush") and all(self.delta)
        ):
            return
        if self.bad("flushes-early"):
            yield from self._bring(loads[: len(loads) // 2])
            yield pb.TransactionResponse(flushed={})
            yield from self._bring(loads[len(loads) // 2 :])
            return
        yield from self._bring(loads)
        if self.late is not None:
            self._commit(*self.late)
            self.late = None
        yield pb.TransactionResponse(flushed={})

    def _bring(self, loads: list[tuple[int, bytes]]) -> Iterator[Any]:
        found: dict[int, list[bytes]] = defaultdict(list)
        for binding, key in loads:
            row = self.db.execute(
                "select doc from rows where resource = ? and key = ?",
                [self.tables[binding], self._key(key)],
            ).fetchone()
            if row is not None or self.bad("null-for-missing"):
                found[binding].append(self._changed(row[0]) if row else b"null")
        for binding, docs in found.items():
            for at in range(0, len(docs), 500):
                yield _loaded(binding, docs[at : at + 500])

    def _changed(self, doc: bytes) -> bytes:
        if self.bad("leaves-out-nulls"):
            text = doc.decode().replace('"er":null', '"er":0')
            return text.encode()
        if self.bad("numbers-are-doubles"):
            return json.dumps(json.loads(doc, parse_int=lambda text: int(float(text)))).encode()
        if self.bad("ascii-only"):
            return doc.decode().encode("ascii", errors="replace")
        if self.bad("cuts-at-nul"):
            return doc.replace(b"\\u0000", b"")
        return doc

    def _key(self, key: bytes) -> bytes:
        return key.partition(b"\0")[0] if self.bad("first-key-field-only") else key

    # Store.

    def _store(self, message: Any) -> Iterator[Any]:
        if message.empties and message.binding < len(self.tables):
            self._empty(message.binding)
            return
        keys = self._slices(message.arena, message.packed_keys, "store")
        self._slices(message.arena, message.packed_values, "store")
        docs = self._slices(message.arena, message.docs_json, "store")
        deletes = list(message.deletes) or [False] * len(keys)
        exists = list(message.exists)
        if not keys:
            self.refuse("store-without-documents", "Store has no keys")
        if len(keys) != len(docs):
            self.refuse("store-with-unequal-lists", "Store has unequal lists")
        if len(exists) != len(keys):
            self.refuse("store-without-exists", "exists is not as long as the keys")
        if len(deletes) != len(keys):
            self.refuse("store-with-unequal-deletes", "deletes is not as long as the keys")
        if message.binding >= len(self.tables):
            self.refuse("store-to-missing-binding", f"there is no binding {message.binding}")
        self._refuse_twice(message.binding, keys)
        if self.bad("refuses-large") and any(len(doc) > 1 << 20 for doc in docs):
            raise Refused("a document is too large")
        if self.bad("drops-deletes"):
            deletes = [False] * len(keys)
        self.begun.add(message.binding)
        new = [
            (message.binding, self._key(key), doc, delete)
            for key, doc, delete in zip(keys, docs, deletes, strict=False)
        ]
        if self.bad("trusts-exists"):
            actual = [self._is_stored(store) for store in new]
            new = [
                store
                for store, claimed, stored in zip(new, exists, actual, strict=True)
                if claimed == stored
            ]
        if self.bad("delete-must-exist") and any(
            delete and not self._is_stored(store)
            for store, delete in zip(new, deletes, strict=True)
        ):
            raise Refused("the document to remove does not exist")
        if self.bad("locks-in-store") and not self.db.in_transaction:
            self.db.execute("begin immediate")
        through = self.endpoint.mode in (PLAIN, PUSH) or self.bad("writes-through")
        if self.bad("forgets-after-many"):
            new = new[: max(0, 1_000 - self.stored)]
        self.stored = getattr(self, "stored", 0) + len(new)
        if through:
            self._write(new)
        else:
            self.stores += new
        yield from ()

    stored = 0

    def _empty(self, binding: int) -> None:
        first = binding not in self.begun and (self.low, self.high) == (0, 0xFFFFFFFF)
        if not first and not self.bad("empties-anytime"):
            raise Refused("it is not the first, or not for all keys")
        self.begun.add(binding)
        if self.bad("empties-nothing") or (self.bad("delta-keeps-all") and self.delta[binding]):
            return
        new = [(binding, b"", b"", "all")]
        if self.endpoint.mode == PLAIN or self.bad("empties-at-once"):
            self._write(new)
        else:
            self.stores += new

    def _refuse_twice(self, binding: int, keys: list[bytes]) -> None:
        before = set() if self.bad("looks-within-a-store") else self.keys[binding]
        twice = len({*keys}) < len(keys) or before & {*keys}
        if twice and not self.delta[binding] and not self.bad("takes-a-key-twice"):
            raise Refused("a key is stored twice")
        self.keys[binding] |= {*keys}

    def _is_stored(self, store: tuple[int, bytes, bytes, bool]) -> bool:
        binding, key, _, _ = store
        return (
            self.db.execute(
                "select 1 from rows where resource = ? and key = ?", [self.tables[binding], key]
            ).fetchone()
            is not None
        )

    def _write(self, stores: Any) -> None:
        with self._transaction():
            self._put(stores)

    def _put(self, stores: Any) -> None:
        upsert = "insert into rows values (?, ?, ?, ?) on conflict do update set doc = excluded.doc"
        upsert += ", epoch = excluded.epoch"
        if not self.bad("older-overwrites"):
            upsert += " where excluded.epoch >= rows.epoch"
        if self.bad("keeps-the-first"):
            upsert = "insert or ignore into rows values (?, ?, ?, ?)"
        delete = "delete from rows where resource = ? and key = ? and epoch <= ?"
        delta = [is_delta and not self.bad("ignores-delta") for is_delta in self.delta]
        tables = self.tables
        self.driver.empty(self.db, [tables[at] for at, _, _, gone in stores if gone == "all"])
        stores = [each for each in stores if each[3] != "all"]
        self.db.executemany(
            "insert into pushed values (?, ?)",
            [(tables[at], doc) for at, _, doc, _ in stores if delta[at]],
        )
        self.db.executemany(
            delete,
            [
                (tables[at], key, self.epoch)
                for at, key, _, gone in stores
                if gone and not delta[at]
            ],
        )
        self.db.executemany(
            upsert,
            [
                (tables[at], key, doc, self.epoch)
                for at, key, doc, gone in stores
                if not gone and not delta[at]
            ],
        )

    # StartCommit.

    def _start_commit(self, message: Any) -> Iterator[Any]:
        if not message.runtime_checkpoint:
            self.refuse("start-commit-without-checkpoint", "StartCommit has no runtime_checkpoint")
        if self.db.in_transaction:
            self.db.execute("rollback")
        stores, self.stores, self.stored = self.stores, [], 0
        self.keys.clear()
        self.begun.clear()
        checkpoint = message.runtime_checkpoint
        self.commits += 1
        if self.bad("commits-only-once") and self.commits > 1:
            stores = []
        if self.endpoint.mode == STAGED:
            name = secrets.token_hex(8)
            content = [
                (at, base64.b64encode(key).decode(), doc.decode(), gone)
                for at, key, doc, gone in stores
            ]
            if not self.bad("stages-in-memory"):
                (self._folder() / name).write_text(json.dumps(content))
            own = f"{self.low:08x}-{self.high:08x}"
            self.state = {**self.state, own: name}
            patch = {
                "driver_checkpoint_json": json.dumps({own: name}).encode(),
                "rfc7396_merge_patch": True,
            }
            yield pb.TransactionResponse(started_commit={"driver_checkpoint": patch})
            self.unstaged = (self._folder() / name, json.dumps(content))
            return
        if self.endpoint.mode == REMOTE:
            if self.bad("acknowledges-before-commit") or self.bad("loads-while-committing"):
                self.late = (stores, checkpoint)
            else:
                self._commit(stores, checkpoint)
        yield pb.TransactionResponse(started_commit={})

    def _commit(self, stores: Any, checkpoint: bytes) -> None:
        if self.bad("skips-empty-commits") and not stores:
            return
        if self.bad("checkpoint-apart"):
            self._write(stores)
            threading.Event().wait(2)
            stores = []
        with self._transaction() as db:
            self._put(stores)
            done = db.execute(
                "update fences set checkpoint = ? where task = ? and low = ? and high = ?"
                + ("" if self.bad("forgets-the-fence") else f" and fence = {self.fence}"),
                [checkpoint, self.task, self.low, self.high],
            )
            if done.rowcount != 1:
                raise Refused("this shard was fenced off")
        self.driver.checkpoints[self.task] = checkpoint

    def _transaction(self) -> "Immediate":
        return Immediate(self.db)


def _loaded(binding: int, docs: list[bytes]) -> Any:
    answer = pb.TransactionResponse()
    answer.loaded.binding = binding
    answer.loaded.arena = b"".join(docs)
    at = 0
    for doc in docs:
        answer.loaded.docs_json.add(begin=at, end=at + len(doc))
        at += len(doc)
    return answer


class Immediate:
    def __init__(self, db: sqlite3.Connection) -> None:
        self.db = db

    def __enter__(self) -> sqlite3.Connection:
        self.db.execute("begin immediate")
        return self.db

    def __exit__(self, kind: Any, *_: object) -> None:
        self.db.execute("rollback" if kind else "commit")
