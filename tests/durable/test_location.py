from pathlib import Path

import pytest

from penstock.durable.location import children, join, normal, open_blob
from penstock.errors import UsageError


@pytest.mark.parametrize(
    "url",
    [
        *("", "data", "./data", "/data", "http://x/y", "memory", "file:", "file://host/path"),
        *("s3:bucket", "s3://", "s3:///x", "s3://b/a//c", "s3://b/..", "memory:a b", "s3://b/a b"),
    ],
)
def test_other_urls_are_refused_with_those_that_are_valid(url: str) -> None:
    with pytest.raises(UsageError, match="is malformed") as refused:
        open_blob(url, writing=True)
    assert "file:./data" in refused.value.hint
    assert "s3://bucket/prefix" in refused.value.hint


@pytest.mark.parametrize("url", ["file:~", "file:~/data", "file:~ann/data"])
def test_a_tilde_is_not_taken_for_a_folder(url: str) -> None:
    with pytest.raises(UsageError, match="begins with a tilde") as refused:
        open_blob(url, writing=True)
    assert "Write the path out" in refused.value.hint
    assert normal("file:./~").endswith("/~")


@pytest.mark.parametrize(
    "endpoint", ["not a url", "hush:hush@host", "http://", "http://host:hush", "ftp://hush"]
)
@pytest.mark.parametrize("name", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"])
def test_an_endpoint_that_is_none_is_refused_and_not_repeated(
    monkeypatch: pytest.MonkeyPatch, name: str, endpoint: str
) -> None:
    monkeypatch.setenv(name, endpoint)
    with pytest.raises(UsageError, match="AWS_ENDPOINT_URL is malformed") as refused:
        open_blob("s3://bucket/prefix")
    assert "hush" not in f"{refused.value!r} {refused.value.__notes__}"
    assert "not a url" not in str(refused.value)


def test_a_password_in_a_url_is_not_repeated() -> None:
    with pytest.raises(UsageError) as refused:
        open_blob("s3://key:hush@bucket/prefix")
    assert "hush" not in str(refused.value)


def test_a_folder_that_does_not_exist_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f'folder "{tmp_path}/nowhere"'):
        open_blob(f"file:{tmp_path}/nowhere")
    assert children(f"file:{tmp_path}/nowhere") == []
    assert not [*tmp_path.iterdir()]


def test_paths_are_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for url in ("file:./data", "file:data", "file:data/", f"file:{tmp_path}/data"):
        assert normal(url) == f"file:{tmp_path}/data"
    assert normal(f"file://{tmp_path}/data") == f"file:{tmp_path}/data"
    assert normal("s3://bucket/a/") == "s3://bucket/a"
    blob = open_blob("file:./data", writing=True)
    assert blob.name == f"file:{tmp_path}/data"
    blob.close()


def test_memory_is_private_without_a_name_and_shared_with_one(tmp_path: Path) -> None:
    one, other = open_blob("memory:"), open_blob("memory:")
    one.put("k", b"")
    assert other.get("k") is None
    name = f"memory:{tmp_path.name}"
    one, other = open_blob(name), open_blob(name)
    one.put("k", b"")
    assert one.close()
    assert other.get("k") == b""


@pytest.mark.parametrize("name", ["", "a/b", "..", "tmp", "a b"])
def test_a_folder_name_must_be_one_word(name: str) -> None:
    with pytest.raises(UsageError):
        join("file:./lake", name)


def test_private_memory_has_no_folders() -> None:
    with pytest.raises(UsageError, match="each opening makes a new one"):
        join("memory:", "shop")
    assert join("memory:lake", "shop") == "memory:lake/shop"
    assert join("s3://bucket", "shop") == "s3://bucket/shop"
