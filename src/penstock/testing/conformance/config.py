"""Configuration file of the suite, written by the author of a connector.

    endpoint: {path: /tmp/conformance.db}
    resource: {table: "{name}"}
    pattern: remote-authoritative
    accepts_delete: true
    command: [my-connector, --listen, "{address}"]
    read: [sqlite3, -json, /tmp/conformance.db, "select * from {name}"]

The first four are required. Without `command` the suite cannot kill the connector. Without `read`
it can inspect only data that a Load returns. Checks that need them are then listed as skipped.
"""

import enum
import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from penstock.errors import UsageError
from penstock.protocol.transport_security import Security

__all__ = ["EXACTLY_ONCE", "Config", "Pattern", "Tls", "filled", "load"]


class Pattern(enum.StrEnum):
    """Authority of the commit, and guarantee of the endpoint."""

    REMOTE_AUTHORITATIVE = "remote-authoritative"
    """The endpoint stores the checkpoint, and fences."""

    IDEMPOTENT_APPLY = "idempotent-apply"
    """Work is staged, and applied after the recovery log has committed."""

    NON_TRANSACTIONAL = "non-transactional"
    """Stores are written through; uncommitted ones are stored again."""

    PUSH_ONLY = "push-only"
    """Documents are sent, and cannot be loaded."""


EXACTLY_ONCE: Final = frozenset({Pattern.REMOTE_AUTHORITATIVE, Pattern.IDEMPOTENT_APPLY})


def _placeholders(value: str, known: Sequence[str]) -> None:
    for _, name, _, _ in string.Formatter().parse(value):
        if name is not None and name not in known:
            placeholders = ", ".join(f"{{{placeholder}}}" for placeholder in known)
            raise ValueError(
                f"there is no placeholder {{{name}}}; there is {placeholders}; "
                "write {{ and }} for braces"
            )


def _command(value: tuple[str, ...]) -> tuple[str, ...]:
    for part in value:
        _placeholders(part, ("address", "port"))
    return value


def _reader(value: tuple[str, ...]) -> tuple[str, ...]:
    for part in value:
        _placeholders(part, ("name",))
    return value


def _template(value: dict[str, Any]) -> dict[str, Any]:
    for text in _strings(value):
        _placeholders(text, ("name",))
    if not any("{name}" in text for text in _strings(value)):
        raise ValueError("no string contains {name}, so all checks would use one resource")
    return value


def _strings(value: Any) -> list[str]:
    match value:
        case str():
            return [value]
        case Mapping():
            return [text for inner in value.values() for text in _strings(inner)]
        case list() | tuple():
            return [text for inner in value for text in _strings(inner)]
        case _:
            return []


def filled(template: Any, **names: str) -> Any:
    """Return `template` with the placeholders in all its strings replaced."""
    match template:
        case str():
            return template.format(**names)
        case Mapping():
            return {key: filled(value, **names) for key, value in template.items()}
        case list() | tuple():
            return [filled(value, **names) for value in template]
        case _:
            return template


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Tls(_Section):
    """Certificates for a connector that uses TLS."""

    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    server_name: str = ""


Template = Annotated[dict[str, Any], AfterValidator(_template)]


class Config(_Section):
    """Connector, with its testable properties."""

    endpoint: dict[str, Any] = Field(repr=False)
    """Endpoint configuration, passed to the connector unchanged."""

    resource: Template
    """Resource configuration; `{name}` is replaced by a unique name."""

    pattern: Pattern
    accepts_delete: bool
    delta_resource: Template | None = None
    """Resource configuration of a binding with delta updates, if different."""

    delta: bool = True
    """Support for bindings with delta updates."""

    exists: Literal["hint", "exact"] = "hint"
    """Tolerance of a wrong `exists` in a Store: `hint` tolerates it."""

    newer_wins: bool = True
    """Ability of the endpoint to compare the age of two values."""

    breaks_locks: bool = True
    """Ability of a shard to open while another process hangs in Store.

    False if the endpoint allows one writer at a time and cannot end that writer.
    """

    command: Annotated[tuple[str, ...], AfterValidator(_command)] = ()
    """Command that starts the connector on `{address}`; `{port}` is the port of it."""

    read: Annotated[tuple[str, ...], AfterValidator(_reader)] = ()
    """Command that prints the rows, or pushed documents, of `{name}` as one JSON object per line.
    """

    patience_s: float = Field(default=30.0, gt=0)
    """Timeout of one response, in seconds."""

    settle_s: float = Field(default=0.2, gt=0)
    """Delay for messages without a response, such as Store, to take effect, in seconds."""

    start_s: float = Field(default=60.0, gt=0)
    """Timeout of the start of `command`, in seconds."""

    tls: Tls | None = None
    token: str = Field(default="", repr=False)
    plaintext: bool = False

    @property
    def security(self) -> Security:
        """Transport security of the connection to the connector."""
        tls = self.tls or Tls()
        return Security(
            ca=tls.ca,
            certificate=tls.certificate,
            key=tls.key,
            token=self.token,
            plaintext=self.plaintext,
            server_name=tls.server_name,
        )


def load(path: str | Path) -> Config:
    """Return the configuration in a file.

    Raises:
        UsageError: the file cannot be read, or is invalid.
    """
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f'could not read conformance file "{path}"', detail=f"{error}.", hint="Check the path."
        ) from error
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UsageError(
            f'conformance file "{path}" is not YAML', detail=f"{error}.", hint="Correct the syntax."
        ) from None
    return parse(content, f'conformance file "{path}"')


def parse(content: Any, subject: str = "conformance configuration") -> Config:
    """Return the configuration in `content`; errors refer to it as `subject`.

    Raises:
        UsageError: the configuration is invalid.
    """
    if not isinstance(content, dict):
        raise UsageError(
            f"{subject} is not a mapping",
            hint="Write endpoint:, resource:, pattern: and accepts_delete:.",
        )
    try:
        return Config.model_validate(content)
    except ValidationError as error:
        problems = [
            f"{'.'.join(str(key) for key in problem['loc'])}: {_describe(problem)}"
            for problem in error.errors(include_input=False, include_url=False)
        ]
        raise UsageError(
            f"{subject} is invalid: {problems[0]}",
            detail=" ".join(f"Also {problem}." for problem in problems[1:]),
            hint="Required keys are endpoint, resource, pattern and accepts_delete. The protocol "
            "reference lists all keys.",
        ) from None


def _describe(problem: Any) -> str:
    if problem["type"] == "extra_forbidden":
        return "there is no such key"
    return str(problem["msg"]).removeprefix("Value error, ")
