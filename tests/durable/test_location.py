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
def test_open_blob_with_malformed_url_raises_usage_error_with_valid_forms(url: str) -> None:
    with pytest.raises(UsageError, match="is malformed") as refused:
        open_blob(url, writing=True)
    assert "file:./data" in refused.value.hint
    assert "s3://bucket/prefix" in refused.value.hint


@pytest.mark.parametrize("url", ["file:~", "file:~/data", "file:~ann/data"])
def test_open_blob_with_tilde_path_raises_usage_error(url: str) -> None:
    with pytest.raises(UsageError, match="begins with a tilde") as refused:
        open_blob(url, writing=True)
    assert "Write the path out" in refused.value.hint
    assert normal("file:./~").endswith("/~")


@pytest.mark.parametrize(
    "endpoint", ["not a url", "hush:hush@host", "http://", "http://host:hush", "ftp://hush"]
)
@pytest.mark.parametrize("name", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"])
def test_open_blob_with_malformed_endpoint_raises_usage_error_without_its_value(
    monkeypatch: pytest.MonkeyPatch, name: str, endpoint: str
) -> None:
    monkeypatch.setenv(name, endpoint)
    with pytest.raises(UsageError, match="AWS_ENDPOINT_URL is malformed") as refused:
        open_blob("s3://bucket/prefix")
    assert "hush" not in f"{refused.value!r} {refused.value.__notes__}"
    assert "not a url" not in str(refused.value)


def test_open_blob_error_omits_password_of_url() -> None:
    with pytest.raises(UsageError) as refused:
        open_blob("s3://key:hush@bucket/prefix")
    assert "hush" not in str(refused.value)


def test_open_blob_with_missing_folder_raises_usage_error_and_creates_nothing(
    tmp_path: Path,
) -> None:
    with pytest.raises(UsageError, match=f'folder "{tmp_path}/nowhere"'):
        open_blob(f"file:{tmp_path}/nowhere")
    assert children(f"file:{tmp_path}/nowhere") == []
    assert not [*tmp_path.iterdir()]


def test_normal_returns_absolute_url_of_relative_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for url in ("file:./data", "file:data", "file:data/", f"file:{tmp_path}/data"):
        assert normal(url) == f"file:{tmp_path}/data"
    assert normal(f"file://{tmp_path}/data") == f"file:{tmp_path}/data"
    assert normal("s3://bucket/a/") == "s3://bucket/a"
    blob = open_blob("file:./data", writing=True)
    assert blob.name == f"file:{tmp_path}/data"
    blob.close()


def test_memory_location_is_shared_only_under_a_name(tmp_path: Path) -> None:
    one, other = open_blob("memory:"), open_blob("memory:")
    one.put("k", b"")
    assert other.get("k") is None
    name = f"memory:{tmp_path.name}"
    one, other = open_blob(name), open_blob(name)
    one.put("k", b"")
    assert one.close()
    assert other.get("k") == b""


@pytest.mark.parametrize("name", ["", "a/b", "..", "tmp", "a b"])
def test_join_with_malformed_folder_name_raises_usage_error(name: str) -> None:
    with pytest.raises(UsageError):
        join("file:./lake", name)


def test_join_with_unnamed_memory_location_raises_usage_error() -> None:
    with pytest.raises(UsageError, match="each opening makes a new one"):
        join("memory:", "shop")
    assert join("memory:lake", "shop") == "memory:lake/shop"
    assert join("s3://bucket", "shop") == "s3://bucket/shop"
