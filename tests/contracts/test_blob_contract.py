"""Contract of `Blob`, on every store."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path

import pytest
from tests.contracts.stores import Opener, vector
from tests.durable.children import line_of, started

from penstock.durable.blob import Blob
from penstock.durable.location import children, join, open_blob
from penstock.errors import UsageError


def test_blob_vector_p17_get_set_delete_close_matches_results(opener: Opener) -> None:
    blob, reader = opener(), opener()
    case = vector("P17")
    results = [_obeyed(blob, *operation) for operation in case["given"]["ops"]]
    assert results == case["expect"]["results"]
    assert reader.get("k0") is None  # Closing the writer does not affect readers.


def _obeyed(blob: Blob, verb: str, key: str = "", value: str = "") -> object:
    try:
        match verb:
            case "get":
                found = blob.get(key)
                return None if found is None else found.decode()
            case "set":
                blob.put(key, value.encode())
            case "delete":
                blob.delete(key)
            case _:
                return blob.close()
    except UsageError:
        return "error"
    return "ok"


def test_blob_create_of_existing_key_returns_false_and_keeps_bytes(opener: Opener) -> None:
    blob = opener()
    assert blob.create("log/0", b"first")
    assert not blob.create("log/0", b"second")
    assert blob.get("log/0") == b"first"


def test_blob_put_is_visible_to_another_handle(opener: Opener) -> None:
    writer, reader = opener(), opener()
    writer.put("a/b/c", b"there")
    assert reader.get("a/b/c") == b"there"
    reader.settle(["a/b/c"])


def test_blob_create_after_delete_succeeds(opener: Opener) -> None:
    blob = opener()
    assert blob.create("k", b"1")
    blob.delete("k")
    assert blob.create("k", b"2")
    assert blob.get("k") == b"2"


@pytest.mark.parametrize("data", [b"", b"\x00", bytes(range(256)) * 40_000], ids=len)
def test_blob_get_returns_exact_bytes_of_put_and_create(opener: Opener, data: bytes) -> None:
    blob = opener()
    blob.put("put", data)
    assert blob.create("create", data)
    assert blob.get("put") == blob.get("create") == data


def test_blob_get_with_start_returns_only_the_tail(opener: Opener) -> None:
    blob = opener()
    blob.put("batch/a", b"0123456789")
    assert blob.get("batch/a", start=7) == b"789"
    assert blob.get("batch/a", start=10) == b""
    assert blob.get("batch/a", start=11) == b""
    assert blob.get("batch/b", start=1) is None


def test_blob_list_is_ordered_and_starts_after_the_given_key(opener: Opener) -> None:
    blob = opener()
    keys = ["a-b/0", "a.b", "a/0", "a/1", "a/b/2", "ab", "b/0"]
    for key in reversed(keys):
        blob.put(key, key.encode())
    assert [listed.key for listed in blob.list("")] == keys
    assert [listed.key for listed in blob.list("a/")] == ["a/0", "a/1", "a/b/2"]
    assert [listed.key for listed in blob.list("a")] == keys[:-1]
    assert [listed.key for listed in blob.list("a/b")] == ["a/b/2"]
    assert [listed.key for listed in blob.list("a/", after="a/0")] == ["a/1", "a/b/2"]
    assert [listed.key for listed in blob.list("a", after="a/z")] == ["ab"]
    assert [listed.size for listed in blob.list("b/")] == [3]
    assert all(listed.modified_ms > 0 for listed in blob.list(""))
    assert blob.list("nothing/") == []


def test_blob_list_of_empty_store_returns_nothing(opener: Opener) -> None:
    assert opener().list("") == []


def test_blob_settle_of_deleted_key_raises_no_error(opener: Opener) -> None:
    blob = opener()
    blob.put("log/0", b"")
    blob.delete("log/0")
    blob.settle(["log/0", "never/was"])


@pytest.mark.parametrize(
    "key", ["", "/a", "a/", "a//b", "..", "a/../b", ".", "a b", "tmp", "tmp/a", "ä", "a\n", "a~1"]
)
def test_blob_call_with_malformed_key_raises_usage_error(opener: Opener, key: str) -> None:
    blob = opener()
    for call in (
        blob.get,
        blob.delete,
        lambda key: blob.put(key, b""),
        lambda key: blob.settle([key]),
    ):
        with pytest.raises(UsageError):
            call(key)
    with pytest.raises(UsageError):
        blob.create(key, b"")


def test_closed_blob_raises_usage_error_on_every_call(opener: Opener) -> None:
    blob = opener()
    assert blob.close()
    assert not blob.close()
    calls: list[Callable[[], object]] = [
        lambda: blob.get("k"),
        lambda: blob.put("k", b""),
        lambda: blob.create("k", b""),
        lambda: blob.settle(["k"]),
        lambda: blob.delete("k"),
        lambda: blob.list(""),
    ]
    for call in calls:
        with pytest.raises(UsageError, match="is closed"):
            call()


def test_blob_create_by_racing_threads_succeeds_exactly_once(opener: Opener) -> None:
    blobs = [opener() for _ in range(4)]
    start = threading.Barrier(len(blobs), timeout=60)

    def run(number: int) -> list[int]:
        won = []
        for key in range(3):
            start.wait()
            if blobs[number].create(f"race/{key}", f"{number} took {key}".encode()):
                won.append(key)
        return won

    with ThreadPoolExecutor(len(blobs)) as threads:
        won = list(threads.map(run, range(len(blobs))))
    assert sorted(chain(*won)) == [0, 1, 2]
    for number, keys in enumerate(won):
        for key in keys:
            assert blobs[0].get(f"race/{key}") == f"{number} took {key}".encode()


@pytest.mark.parametrize(("kind", "count"), [("files", 50), ("objects", 3)])
def test_blob_create_by_racing_processes_succeeds_exactly_once(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str, count: int
) -> None:
    url = f"file:{tmp_path}" if kind == "files" else request.getfixturevalue("object_url")
    racers = {name: started("race", url, name, str(count)) for name in ("a", "b", "c")}
    assert [line_of(racer.stdout) for racer in racers.values()] == ["ready"] * 3
    for racer in racers.values():
        assert racer.stdin is not None
        racer.stdin.write("go\n")
        racer.stdin.flush()
    won: dict[str, str] = {}
    for name, racer in racers.items():
        said, _ = racer.communicate()
        assert racer.returncode == 0
        for line in said.split("\n"):
            if line.startswith("won"):
                number = line.removeprefix("won ")
                assert number not in won
                won[number] = name
    blob = open_blob(url)
    assert len(won) == count
    for number, name in won.items():
        assert blob.get(f"race/{number}") == f"{name} took {number}".encode()
    blob.close()


@pytest.mark.parametrize("kind", ["memory", "files", "objects"])
def test_children_of_location_are_readable_as_locations(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str
) -> None:
    match kind:
        case "memory":
            lake = f"memory:{tmp_path.name}"
        case "files":
            lake = f"file:{tmp_path}/lake"
        case _:
            lake = request.getfixturevalue("object_url")
    assert children(lake) == []
    for name in ("shop", "catalog"):
        location = open_blob(join(lake, name), writing=True)
        location.put("log/0", name.encode())
        location.close()
    whole = open_blob(lake, writing=True)
    whole.put("notes", b"")
    assert children(lake) == ["catalog", "shop"]
    assert whole.get("shop/log/0") == b"shop"
    assert children(join(lake, "shop")) == ["log"]
    whole.close()
