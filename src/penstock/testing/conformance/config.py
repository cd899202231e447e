"""What a connector's author tells the suite, in a file.

    endpoint: {path: /tmp/conformance.db}
    resource: {table: "{name}"}
    pattern: remote-authoritative
    accepts_delete: true
    command: [my-connector, --listen, "{address}"]
    read: [sqlite3, -json, /tmp/conformance.db, "select * from {name}"]

The first four are needed. Without `command` nothing can be killed, and without
`read` nothing can be seen that a Load does not bring; what is not tested for that
reason is listed as skipped.
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
    """Whose commit counts, and what the endpoint can promise."""

    REMOTE_AUTHORITATIVE = "remote-authoritative"
    """The endpoint keeps the checkpoint, and fences."""

    IDEMPOTENT_APPLY = "idempotent-apply"
    """Work is staged, and applied after the recovery log has committed."""

    NON_TRANSACTIONAL = "non-transactional"
    """Stores are written through; what was not committed is stored again."""

    PUSH_ONLY = "push-only"
    """Documents are sent, and cannot be asked for."""


EXACTLY_ONCE: Final = frozenset({Pattern.REMOTE_AUTHORITATIVE, Pattern.IDEMPOTENT_APPLY})


def _placeholders(value: str, known: Sequence[str]) -> None:
    for _, name, _, _ in string.Formatter().parse(value):
        if name is not None and name not in known:
            raise ValueError(
                f"there is no placeholder {{{name}}}; write {{{{ and }}}} for braces, "
                f"and of {', '.join(f'{{{each}}}' for each in known)} what is wanted"
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
    for each in _strings(value):
        _placeholders(each, ("name",))
    if not any("{name}" in each for each in _strings(value)):
        raise ValueError("no string in it has {name}, so every check would use one resource")
    return value


def _strings(value: Any) -> list[str]:
    match value:
        case str():
            return [value]
        case Mapping():
            return [found for inner in value.values() for found in _strings(inner)]
        case list() | tuple():
            return [found for inner in value for found in _strings(inner)]
        case _:
            return []


def filled(template: Any, **names: str) -> Any:
    """`template` with its placeholders replaced, in every string within."""
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
    """Certificates, if the connector is spoken to over TLS."""

    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    server_name: str = ""


Template = Annotated[dict[str, Any], AfterValidator(_template)]


class Config(_Section):
    """A connector, and what of it can be tested."""

    endpoint: dict[str, Any] = Field(repr=False)
    """The endpoint configuration, as it is given to the connector."""

    resource: Template
    """The resource configuration; `{name}` becomes a name of the check's own."""

    pattern: Pattern
    accepts_delete: bool
    delta_resource: Template | None = None
    """The resource of a binding that takes delta updates, if it is another."""

    delta: bool = True
    """Whether there are such bindings at all."""

    exists: Literal["hint", "exact"] = "hint"
    """Whether `exists` of a Store may be wrong."""

    newer_wins: bool = True
    """Whether the endpoint can tell an older value from a newer one."""

    breaks_locks: bool = True
    """Whether a shard can open though another process hangs in Store; not where the endpoint
    has one writer at a time, and no way to end it."""

    command: Annotated[tuple[str, ...], AfterValidator(_command)] = ()
    """Starts the connector; `{address}` is where it must listen, `{port}` a part of it."""

    read: Annotated[tuple[str, ...], AfterValidator(_reader)] = ()
    """Prints the rows of the resource `{name}`, or what was pushed, as a JSON object a line."""

    patience_s: float = Field(default=30.0, gt=0)
    """How long a check waits for one answer."""

    settle_s: float = Field(default=0.2, gt=0)
    """How long a connector is given to get at what it does not answer, such as a Store."""

    start_s: float = Field(default=60.0, gt=0)
    """How long `command` may take until it answers."""

    tls: Tls | None = None
    token: str = Field(default="", repr=False)
    plaintext: bool = False

    @property
    def security(self) -> Security:
        """How the line to the connector is made."""
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
    """The configuration in a file.

    Raises:
        UsageError: it cannot be read, or says something it cannot mean.
    """
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f'conformance file "{path}" cannot be read', detail=f"{error}.", hint="Check the path."
        ) from error
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UsageError(
            f'conformance file "{path}" is not YAML', detail=f"{error}.", hint="Mend its syntax."
        ) from None
    return parse(content, f'conformance file "{path}"')


def parse(content: Any, what: str = "the conformance configuration") -> Config:
    """The configuration that `content` is; errors call it `what`.

    Raises:
        UsageError: it says something it cannot mean.
    """
    if not isinstance(content, dict):
        raise UsageError(
            f"{what} holds no mapping",
            hint="Begin with endpoint:, resource:, pattern: and accepts_delete:.",
        )
    try:
        return Config.model_validate(content)
    except ValidationError as error:
        problems = [
            f"{'.'.join(str(key) for key in each['loc'])}: {_what(each)}"
            for each in error.errors(include_input=False, include_url=False)
        ]
        raise UsageError(
            f"{what} is wrong at {problems[0]}",
            detail=" ".join(f"Also {each}." for each in problems[1:]),
            hint="It takes endpoint, resource, pattern, accepts_delete, and what else there is "
            "to tell: command, read, delta_resource, delta, exists, newer_wins, breaks_locks.",
        ) from None


def _what(problem: Any) -> str:
    if problem["type"] == "extra_forbidden":
        return "there is no such key here"
    return str(problem["msg"]).removeprefix("Value error, ")
