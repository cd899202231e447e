"""What went wrong, told by the status of a call.

The first line is the message, the lines after it are detail and hint, of which the hint is
marked by `hint: `. Secrets of the
configuration are taken out of it, wherever they came from.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Final

import grpc
from pydantic import BaseModel, SecretBytes, SecretStr, ValidationError

from penstock.errors import Corruption, Fenced, PenstockError, TransientError, UsageError
from penstock.protocol.errors import LocalProtocolError, RemoteProtocolError
from penstock.protocol.redaction import redact_secrets
from penstock.sdk.errors import BrokenOff, ContractBroken, Overdue, Refused
from penstock.telemetry import fields, logger

__all__ = ["Told", "secrets"]

log = logger("sdk")

TEXT_BYTES: Final = 4_000


class Told:
    """Ends a call with the status that tells of the error raised within."""

    def __init__(self, name: str, context: grpc.ServicerContext) -> None:
        self._name = name
        self._context = context
        self.secrets: Sequence[str] = ()

    def __enter__(self) -> None:
        return None

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if error is None or not isinstance(error, Exception) or self._aborted(error):
            return
        text = redact_secrets(text_of(error, self._name), self.secrets)
        # SUBTLE: gRPC loses the status with the text, if that is longer than 8 KB.
        text = text.encode()[:TEXT_BYTES].decode(errors="ignore")
        if not isinstance(error, PenstockError):
            log.error("connector failed", extra=fields(connector=self._name, error=text))
        self._context.abort(status_of(error), text)

    def _aborted(self, error: Exception) -> bool:
        """`abort` itself raises, and must not be told of again."""
        return type(error) is Exception and not error.args


def status_of(error: BaseException) -> grpc.StatusCode:
    """The status that stands for a kind of error."""
    match error:
        case Fenced() | TransientError():
            return grpc.StatusCode.ABORTED
        case LocalProtocolError() | ContractBroken():
            return grpc.StatusCode.INTERNAL
        case RemoteProtocolError() | UsageError() | ValidationError():
            return grpc.StatusCode.INVALID_ARGUMENT
        case Overdue():
            return grpc.StatusCode.DEADLINE_EXCEEDED
        case BrokenOff():
            return grpc.StatusCode.UNAVAILABLE
        case Refused():
            return grpc.StatusCode.FAILED_PRECONDITION
        case Corruption():
            return grpc.StatusCode.DATA_LOSS
        case _:
            return grpc.StatusCode.UNKNOWN


def text_of(error: BaseException, name: str) -> str:
    """Message, detail and hint, a line each."""
    if isinstance(error, PenstockError):
        parts = [str(error), error.detail, error.hint and f"hint: {error.hint}"]
        return "\n".join(part for part in parts if part)
    return f'connector "{name}" failed: {type(error).__name__}: {error}'


def secrets(configurations: Iterable[BaseModel]) -> list[str]:
    """Return the secrets of configurations."""
    found: set[str] = set()

    def look(value: Any) -> None:
        match value:
            case SecretStr():
                found.add(value.get_secret_value())
            case SecretBytes():
                found.add(value.get_secret_value().decode(errors="replace"))
            case BaseModel():
                for name, field in type(value).model_fields.items():
                    extra, held = field.json_schema_extra, getattr(value, name)
                    hidden = isinstance(extra, dict) and extra.get("secret")
                    look(SecretStr(held) if hidden and isinstance(held, str) else held)
            case dict():
                for each in value.values():
                    look(each)
            case list() | tuple():
                for each in value:
                    look(each)
            case _:
                pass

    for each in configurations:
        look(each)
    return sorted(found - {""})
