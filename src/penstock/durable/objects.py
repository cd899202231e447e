"""`Blob` in a bucket of S3 or of an S3-compatible store.

`create` is a PUT with `If-None-Match: *`. Some stores ignore this header; `probe.py` detects such
a store. Credentials, region and endpoint are read from the usual `AWS_…` environment variables.
The retries of the client are disabled, because `RetryingBlob` retries and reports the failure and
its start.

The errors of the client were determined by experiment (obstore 0.12 against SeaweedFS 4.48 and a
server that returns each status). The client has classes for some responses and only text for the
others. `_Answer` is the one place that parses the HTTP status and the store's error code from
the text. The client reports status 409 as "already exists". In S3, 409 means a conflict of two
concurrent creates, and possibly *neither* has succeeded.

A store that hangs keeps the connection open and sends no data. A request to it ends with a
timeout. A write that timed out is indeterminate: the store may still execute it later.
"""

import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Final, Self
from urllib.parse import urlsplit

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import S3Store

from penstock.deadlines import answer_timeout_s
from penstock.durable.blob import Listed
from penstock.durable.keys import checked_key, checked_prefix, word_of_a_key
from penstock.errors import (
    DeterminateError,
    IndeterminateError,
    StoreError,
    StoreRefused,
    UsageError,
)

__all__ = ["ObjectBlob"]

CONNECT_S: Final = 5.0
REQUEST_S: Final = 300.0
"""Maximum duration of one request, for any size of the transfer."""

UPLOAD_BYTES: Final = 1 << 20
UPLOAD_S: Final = 60.0
"""Response timeout for a body larger than `UPLOAD_BYTES`.

SUBTLE: the client measures the timeout from the start of a request to the first byte of the
response, so the complete body must be sent in that time. All other requests use the answer
deadline.
"""


class ObjectBlob:
    """A `Blob` in a bucket, below `prefix`, which is empty or ends with a slash."""

    def __init__(self, bucket: str, prefix: str = "") -> None:
        self._name = f"s3://{bucket}/{prefix}".rstrip("/")
        self._prefix = prefix
        self._closed = False
        self._reached = False
        self._lock = threading.Lock()
        endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        _check_endpoint(endpoint)
        answer_s = answer_timeout_s()
        with self._request("open", "", writes=False), _understood():
            self._store = _client(bucket, endpoint, answer_s)
            self._uploads = _client(bucket, endpoint, max(answer_s, UPLOAD_S))

    @property
    def name(self) -> str:
        """`s3://`, the bucket and the prefix."""
        return self._name

    def get(self, key: str, *, start: int = 0) -> bytes | None:
        """See `Blob`."""
        whole = self._checked(key)
        with self._request("read", key, writes=False):
            try:
                found = obstore.get(
                    self._store, whole, options={"range": {"offset": start}} if start else {}
                )
                return bytes(found.bytes())
            except FileNotFoundError as error:
                if _Answer.of(error).code == "NoSuchBucket":
                    raise
                return None
            except BaseError as error:
                if _Answer.of(error).status != 416:
                    raise
                return b""  # The object ends before `start`.

    def put(self, key: str, data: bytes) -> None:
        """See `Blob`."""
        whole = self._checked(key)
        with self._request("write", key, writes=True):
            obstore.put(self._for(data), whole, data, mode="overwrite", use_multipart=False)

    def create(self, key: str, data: bytes) -> bool:
        """See `Blob`."""
        whole = self._checked(key)
        with self._request("create", key, writes=True):
            try:
                obstore.put(self._for(data), whole, data, mode="create", use_multipart=False)
            except AlreadyExistsError as error:
                if _Answer.of(error).status == 409:
                    raise
                return False
            return True

    def settle(self, keys: list[str]) -> None:
        """Check the keys. An object store returns only after a write is durable."""
        for key in keys:
            self._checked(key)

    def delete(self, key: str) -> None:
        """See `Blob`."""
        whole = self._checked(key)
        with self._request("delete", key, writes=False):
            try:
                obstore.delete(self._store, whole)
            except FileNotFoundError as error:
                if _Answer.of(error).code == "NoSuchBucket":
                    raise

    def children(self) -> list[str]:
        """Return the names of the direct subfolders, sorted."""
        self._open()
        with self._request("list", "", writes=False):
            below = obstore.list_with_delimiter(self._store, self._prefix or None)
        names = (path.removeprefix(self._prefix).rstrip("/") for path in below["common_prefixes"])
        return sorted(filter(word_of_a_key, names))

    def list(self, prefix: str, *, after: str = "") -> list[Listed]:
        """See `Blob`."""
        self._open()
        whole = self._prefix + checked_prefix(prefix)
        # The client supports only a folder as prefix; the filter below does the rest.
        folder = whole.rpartition("/")[0]
        found: list[Listed] = []
        with self._request("list", prefix, writes=False):
            for chunk in obstore.list(
                self._store,
                folder or None,
                offset=self._prefix + after if after else None,
                chunk_size=1_000,
            ):
                found += [
                    Listed(
                        meta["path"].removeprefix(self._prefix),
                        meta["size"],
                        int(meta["last_modified"].timestamp() * 1_000),
                    )
                    for meta in chunk
                    if meta["path"].startswith(whole)
                ]
        return sorted(listed for listed in found if listed.key > after)

    def close(self) -> bool:
        """See `Blob`."""
        with self._lock:
            closing, self._closed = not self._closed, True
        return closing

    def _for(self, data: bytes) -> S3Store:
        return self._uploads if len(data) > UPLOAD_BYTES else self._store

    @contextmanager
    def _request(self, verb: str, key: str, *, writes: bool) -> Iterator[None]:
        """Translate errors of the client into store errors.

        The errors are not chained: the text of the response repeats request headers, which may
        include a session token.
        """
        try:
            yield
        except (BaseError, FileNotFoundError) as error:
            raise self._error(verb, key, _Answer.of(error), writes=writes) from None
        self._reached = True

    def _error(self, verb: str, key: str, answer: "_Answer", *, writes: bool) -> StoreError:
        subject = f'object "{key}" of location' if key else "location"
        message = f'could not {verb} {subject} "{self._name}"'
        hint = answer.refusal(first=not self._reached)
        if hint is not None:
            return StoreRefused(message, detail=answer.sentence(), hint=hint)
        if not writes or answer.nothing_happened():
            return DeterminateError(message, detail=answer.sentence())
        return IndeterminateError(
            f'{verb} of {subject} "{self._name}" is in doubt', detail=answer.sentence()
        )

    def _checked(self, key: str) -> str:
        self._open()
        return self._prefix + checked_key(key)

    def _open(self) -> None:
        if self._closed:
            raise UsageError(f'location "{self._name}" is closed', hint="Open it again.")


def _client(bucket: str, endpoint: str | None, answer_s: float) -> S3Store:
    return S3Store(
        bucket,
        region=os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1",
        # A custom endpoint seldom has a domain for each bucket.
        virtual_hosted_style_request=endpoint is None,
        client_options={
            "allow_http": (endpoint or "").startswith("http://")
            or os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true", "yes"),
            "connect_timeout": timedelta(seconds=min(CONNECT_S, answer_s)),
            "read_timeout": timedelta(seconds=answer_s),
            "timeout": timedelta(seconds=REQUEST_S),
        },
        retry_config={"max_retries": 0},
    )


def _check_endpoint(endpoint: str | None) -> None:
    if not endpoint:
        return
    try:
        parts = urlsplit(endpoint)
        sound = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        sound = False
    if not sound or not endpoint.isprintable() or " " in endpoint:
        raise _misunderstood()


@contextmanager
def _understood() -> Iterator[None]:
    """Translate a panic of the client, which is no `Exception`, into `UsageError`."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise _misunderstood() from None


def _misunderstood() -> UsageError:
    # The message omits the value, which may contain a password.
    return UsageError(
        "environment variable AWS_ENDPOINT_URL is malformed",
        hint="Write AWS_ENDPOINT_URL (or AWS_ENDPOINT_URL_S3) as http://host:port or https://host.",
    )


@dataclass(frozen=True, slots=True)
class _Answer:
    """Outcome of a failed request, parsed from the text of the client's error."""

    kind: str
    """Error class of the client, without the suffix `Error`."""

    status: int | None
    """HTTP status; None if the store did not respond."""

    code: str
    """Error code of the store, such as `NoSuchBucket`, or empty."""

    transport: str
    """Transport error, such as `Connect` or `Timeout`, or empty."""

    credentials: bool
    """True if the failed request was for credentials, not to the store."""

    @classmethod
    def of(cls, error: Exception) -> Self:
        """Parse the text of an error of the client."""
        text = str(error)
        status = _STATUS.search(text)
        code = _CODE.search(text)
        transport = _TRANSPORT.search(text)
        return cls(
            kind=type(error).__name__.removesuffix("Error"),
            status=int(status[1]) if status else None,
            code=(code[1] or code[2]) if code else "",
            transport=transport[1] if transport else "",
            credentials=_CREDENTIALS.search(text) is not None,
        )

    def refusal(self, *, first: bool) -> str | None:
        """Return a hint for the operator, or None if a retry may succeed.

        `first` is true before the first successful request.
        """
        if self.credentials:
            # After a success, missing credentials are transient.
            return _NO_CREDENTIALS if first else None
        if self.code in _TRANSIENT_CODES or self.status in _TRANSIENT_STATUSES:
            return None
        if self.code == "NoSuchBucket" or self.kind == "FileNotFound" or self.status == 404:
            return "Create the bucket, or check its name and AWS_ENDPOINT_URL."
        if self.kind in ("PermissionDenied", "Unauthenticated") or (
            self.status in (401, 403) or self.code in _WRONG_CREDENTIALS
        ):
            return (
                "Check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and this machine's clock; the key "
                "needs s3:GetObject, s3:PutObject, s3:DeleteObject and s3:ListBucket."
            )
        if self.status is not None and (300 <= self.status < 400):
            return "Set AWS_REGION to the bucket's region."
        if self.kind in ("NotSupported", "InvalidPath", "UnknownConfigurationKey") or (
            self.status == 501 or (self.status is not None and 400 <= self.status < 500)
        ):
            return (
                "Use a store that has S3's conditional create (If-None-Match), or another prefix."
            )
        return None

    def nothing_happened(self) -> bool:
        """Return whether the request certainly changed nothing."""
        return (
            self.credentials
            or self.transport == "Connect"
            or (self.status is not None and self.status < 500)
        )

    def sentence(self) -> str:
        """Return the outcome as a sentence, without any data of the request."""
        if self.credentials:
            return "No credentials were found."
        if self.status is not None:
            return f"The store answered {f'{self.status} {self.code}'.rstrip()}."
        return f"The store did not answer ({self.transport or self.code or self.kind})."


_STATUS: Final = re.compile(r"status code: (\d{3})")
_CODE: Final = re.compile(r"<Code>(\w+)</Code>|\(code: (\w+)\)")
# A part of the credentials is not set, or the request for the role of the machine failed.
_CREDENTIALS: Final = re.compile(r"\AGeneric S3 error: Missing \w+\n|http://169\.254\.169\.254/")
_TRANSPORT: Final = re.compile(r"HttpError \{\s+kind: (\w+)")

_TRANSIENT_STATUSES: Final = frozenset({408, 409, 425, 429})
_TRANSIENT_CODES: Final = frozenset({"RequestTimeout", "SlowDown", "InternalError"})
_WRONG_CREDENTIALS: Final = frozenset({"AccessDenied", "ExpiredToken", "InvalidToken"})
_NO_CREDENTIALS: Final = (
    "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or run where the machine has a role."
)
