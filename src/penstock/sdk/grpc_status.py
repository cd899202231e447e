"""Errors as the gRPC status of a call.

The first line of the text is the message. The next lines are the detail and, after `hint: `, the
hint. Secrets of the configuration are redacted.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Final

import grpc
from pydantic import BaseModel, SecretBytes, SecretStr, ValidationError

from penstock.errors import Corruption, Fenced, PenstockError, TransientError, UsageError
from penstock.protocol.errors import LocalProtocolError, RemoteProtocolError
from penstock.protocol.redaction import redact_secrets
from penstock.sdk.errors import ContractBroken, DeadlineExceeded, Refused, StreamCancelled
from penstock.telemetry import fields, logger

__all__ = ["CallStatus", "secrets"]

log = logger("sdk")

TEXT_BYTES: Final = 4_000


class CallStatus:
    """Context manager that ends a call with the status of the exception raised in it."""

    def __init__(self, name: str, context: grpc.ServicerContext) -> None:
        self._name = name
        self._context = context
        self.secrets: Sequence[str] = ()

    def __enter__(self) -> None:
        return None

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if error is None or not isinstance(error, Exception) or self._is_abort(error):
            return
        text = redact_secrets(text_of(error, self._name), self.secrets)
        # SUBTLE: gRPC drops the status if its text is longer than 8 KB.
        text = text.encode()[:TEXT_BYTES].decode(errors="ignore")
        if not isinstance(error, PenstockError):
            log.error("connector failed", extra=fields(connector=self._name, error=text))
        self._context.abort(status_of(error), text)

    def _is_abort(self, error: Exception) -> bool:
        """Return whether `abort` raised the exception, which is already reported."""
        return type(error) is Exception and not error.args


def status_of(error: BaseException) -> grpc.StatusCode:
    """Return the status code of an error."""
    match error:
        case Fenced() | TransientError():
            return grpc.StatusCode.ABORTED
        case LocalProtocolError() | ContractBroken():
            return grpc.StatusCode.INTERNAL
        case RemoteProtocolError() | UsageError() | ValidationError():
            return grpc.StatusCode.INVALID_ARGUMENT
        case DeadlineExceeded():
            return grpc.StatusCode.DEADLINE_EXCEEDED
        case StreamCancelled():
            return grpc.StatusCode.UNAVAILABLE
        case Refused():
            return grpc.StatusCode.FAILED_PRECONDITION
        case Corruption():
            return grpc.StatusCode.DATA_LOSS
        case _:
            return grpc.StatusCode.UNKNOWN


def text_of(error: BaseException, name: str) -> str:
    """Return message, detail and hint, one line each."""
    if isinstance(error, PenstockError):
        parts = [str(error), error.detail, error.hint and f"hint: {error.hint}"]
        return "\n".join(part for part in parts if part)
    return f'connector "{name}" failed: {type(error).__name__}: {error}'


def secrets(configurations: Iterable[BaseModel]) -> list[str]:
    """Return the secrets of configurations."""
    texts: set[str] = set()

    def collect(value: Any) -> None:
        match value:
            case SecretStr():
                texts.add(value.get_secret_value())
            case SecretBytes():
                texts.add(value.get_secret_value().decode(errors="replace"))
            case BaseModel():
                for name, field in type(value).model_fields.items():
                    extra, content = field.json_schema_extra, getattr(value, name)
                    hidden = isinstance(extra, dict) and extra.get("secret")
                    collect(SecretStr(content) if hidden and isinstance(content, str) else content)
            case dict():
                for item in value.values():
                    collect(item)
            case list() | tuple():
                for item in value:
                    collect(item)
            case _:
                pass

    for configuration in configurations:
        collect(configuration)
    return sorted(texts - {""})
