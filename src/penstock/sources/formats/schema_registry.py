"""Schema registry client: schemas by id, and the latest schema of a subject.

The meaning of an id never changes, so schemas are cached for the lifetime of the process. The
decoder requests a schema when it finds an id for the first time. A late answer is a transient
error. A rejection is a definite error, for the operator.

The interface is Confluent's, which other registries also implement.
"""

import functools
import http.client
import json
import ssl
import urllib.error
import urllib.parse
import urllib.request
from base64 import b64encode
from dataclasses import dataclass, field
from typing import Any, Final

from penstock.errors import DefiniteError, SourceError, TransientError, UsageError

__all__ = ["NoSuchSchema", "Registered", "Registry"]

MAX_BYTES: Final = 16 << 20
"""Maximum size of an answer, in bytes."""

_NOT_NOW: Final = frozenset({408, 421, 425, 429})
_NO_SUCH_SCHEMA: Final = 40403


class NoSuchSchema(DefiniteError):
    """Schema id that does not exist in the registry."""


@dataclass(frozen=True, slots=True)
class Registered:
    """A schema, as stored in the registry."""

    id: int
    schema: str
    kind: str = "AVRO"
    references: tuple[tuple[str, "Registered"], ...] = ()
    """Schemas that this one refers to, by name; each precedes the schemas that refer to it."""


@dataclass(frozen=True, slots=True)
class Registry:
    """Address and credentials of a registry."""

    url: str
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    ca: str | None = field(default=None, repr=False)
    """CA certificates in PEM that verify the registry; None for the system's CA certificates."""

    timeout_ms: int = 10_000

    def __post_init__(self) -> None:
        parts = urllib.parse.urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(
                "url of the schema registry cannot be understood",
                hint="Write it like https://registry.example:8081.",
            )
        if parts.username is not None or parts.password is not None:
            raise UsageError(
                "url of the schema registry holds a user or a password",
                hint="Give them as user and password.",
            )
        if parts.query or parts.fragment:
            raise UsageError(
                "url of the schema registry has a query or a fragment", hint="Leave it out."
            )

    def by_id(self, id: int) -> Registered:
        """Return the schema with an id that a record contains.

        Raises:
            NoSuchSchema: no schema has this id.
            DefiniteError: the registry rejects the request.
            TransientError: the registry did not answer.
        """
        return _by_id(self, id)

    def latest(self, subject: str) -> Registered:
        """Return the newest schema of a subject, which may change at any time.

        Raises:
            DefiniteError: the subject does not exist, or the registry rejects the request.
            TransientError: the registry did not answer.
        """
        return self._version(subject, "latest")

    def _version(self, subject: str, version: str) -> Registered:
        quoted = urllib.parse.quote(subject, safe="")
        response = self._request(f"/subjects/{quoted}/versions/{version}", f'subject "{subject}"')
        return self._registered(response, response.get("id"))

    def _registered(self, response: dict[str, Any], id: Any) -> Registered:
        schema, kind = response.get("schema"), response.get("schemaType", "AVRO")
        if not isinstance(schema, str) or not isinstance(id, int) or not isinstance(kind, str):
            raise self._no_registry()
        references = response.get("references") or []
        resolved = tuple(self._resolve_reference(reference) for reference in references)
        return Registered(id, schema, kind, resolved)

    def _resolve_reference(self, reference: Any) -> tuple[str, Registered]:
        try:
            name, subject = reference["name"], reference["subject"]
            version = int(reference["version"])
        except (KeyError, TypeError, ValueError):
            raise self._no_registry() from None
        # A version of a subject is immutable, as an id is.
        return str(name), _by_version(self, str(subject), version)

    def _request(self, path: str, what: str) -> dict[str, Any]:
        request = urllib.request.Request(self.url.rstrip("/") + path)
        request.add_header("Accept", "application/vnd.schemaregistry.v1+json, application/json")
        if self.user is not None:
            pair = f"{self.user}:{self.password or ''}".encode()
            request.add_header("Authorization", "Basic " + b64encode(pair).decode())
        try:
            with _opener(self.ca).open(request, timeout=self.timeout_ms / 1000) as response:
                body = response.read(MAX_BYTES + 1)
        except urllib.error.HTTPError as error:
            with error:
                body = error.read(1 << 16)
            raise self._rejected(error.code, body, what) from None
        except urllib.error.URLError as error:
            raise self._unreachable(error.reason) from None
        except (OSError, http.client.HTTPException) as error:
            raise self._unreachable(error) from None
        if len(body) > MAX_BYTES or not isinstance(document := _parse_json(body), dict):
            raise self._no_registry()
        return document

    def _rejected(self, status: int, body: bytes, what: str) -> SourceError:
        document = _parse_json(body)
        code = document.get("error_code") if isinstance(document, dict) else None
        if status >= 500 or status in _NOT_NOW:
            return TransientError(
                f"schema registry {self.url} could not answer", detail=f"Its status was {status}."
            )
        if code == _NO_SUCH_SCHEMA:
            return NoSuchSchema(f"{what} does not exist in schema registry {self.url}")
        if status in (401, 403):
            return DefiniteError(
                f"access to schema registry {self.url} was denied",
                detail=f"Its status was {status} for {what}.",
                hint="Check user and password, and the permissions of that user.",
            )
        if status == 404:
            return DefiniteError(
                f"{what} does not exist in schema registry {self.url}",
                hint="Check its name and the registry's url.",
            )
        return DefiniteError(
            f"schema registry {self.url} did not return {what}",
            detail=f"Its status was {status}; redirections are not followed.",
            hint="Check the registry's url.",
        )

    def _unreachable(self, reason: object) -> SourceError:
        if isinstance(reason, ssl.SSLCertVerificationError):
            return DefiniteError(
                f"schema registry {self.url} has a certificate that is not trusted",
                detail=f"{reason.verify_message}.",
                hint="Set ca to the certificate of its authority.",
            )
        return TransientError(
            f"schema registry {self.url} could not be reached",
            detail=f"The attempt ended with {type(reason).__name__}.",
            hint="Check that it runs and that this host may connect to it.",
        )

    def _no_registry(self) -> DefiniteError:
        return DefiniteError(
            f"server at {self.url} is not a schema registry",
            hint="Check the registry's url.",
        )


@functools.lru_cache(maxsize=4096)
def _by_id(registry: Registry, id: int) -> Registered:
    # Errors are not cached: the registry may be available at the next record.
    return registry._registered(registry._request(f"/schemas/ids/{id}", f"schema id {id}"), id)


@functools.lru_cache(maxsize=4096)
def _by_version(registry: Registry, subject: str, version: int) -> Registered:
    return registry._version(subject, str(version))


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Handler that follows no redirect: the password would be sent to another server."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


@functools.lru_cache(maxsize=16)
def _opener(ca: str | None) -> urllib.request.OpenerDirector:
    try:
        context = ssl.create_default_context(cadata=ca)
    except ssl.SSLError:
        raise UsageError(
            "ca of the schema registry contains no certificates", hint="Use PEM."
        ) from None
    return urllib.request.build_opener(urllib.request.HTTPSHandler(context=context), _NoRedirects)


def _parse_json(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return None
