"""A pipeline's file, parsed and checked.

Every error names the line and the key. `${NAME}` in a value stands for an
environment variable and is put in after parsing, so a secret cannot change
what the file means, and never shows up in an error about it.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from penstock.errors import UsageError
from penstock.pipeline.durations import milliseconds
from penstock.sources.postgres.config import PostgresConfig

__all__ = ["Pipeline", "SourceSection", "load"]

_VARIABLE: Final = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
_NAME: Final = r"^[A-Za-z_][A-Za-z0-9_-]{0,62}$"


def _duration(value: object) -> int:
    try:
        return milliseconds(value)
    except UsageError as error:
        raise ValueError(f"{error}; {error.hint}") from None


Duration = Annotated[int, BeforeValidator(_duration)]
Name = Annotated[str, Field(pattern=_NAME)]


def _postgres(value: object) -> PostgresConfig:
    if not isinstance(value, Mapping):
        raise ValueError("give url, publication and tables, as a mapping")
    try:
        return PostgresConfig.parse(value)
    except UsageError as error:
        raise ValueError(f"{error}; {error.hint}") from None


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)


class SourceSection(_Section):
    """One source: what it is, and how its progress is called."""

    postgres: Annotated[PostgresConfig, BeforeValidator(_postgres)]
    progress: Name | None = None


class Pipeline(_Section):
    """A whole file."""

    location: str
    writer: str | None = None
    tick: Duration = 1_000
    retain: Duration = 86_400_000
    sources: dict[Name, SourceSection] = {}
    collections: dict[str, Any] = {}
    materializations: dict[str, Any] = {}


def load(path: str | Path, environment: Mapping[str, str] | None = None) -> Pipeline:
    """The pipeline in a file.

    Raises:
        UsageError: it cannot be read, or says something it cannot mean.
    """
    path = Path(path)
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f'pipeline file "{path}" cannot be read', detail=f"{error}.", hint="Check the path."
        ) from error
    try:
        document = yaml.compose(text, Loader=yaml.SafeLoader)
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UsageError(
            f'pipeline file "{path}" is not YAML', detail=f"{error}.", hint="Mend its syntax."
        ) from None
    if not isinstance(content, dict):
        raise UsageError(
            f'pipeline file "{path}" holds no mapping',
            hint="Begin with location: and sources:, as in the README.",
        )
    content = _interpolated(content, os.environ if environment is None else environment, path, ())
    try:
        return Pipeline.model_validate(content)
    except ValidationError as error:
        raise _misread(path, document, error) from None


def _interpolated(
    value: Any, environment: Mapping[str, str], path: Path, at: tuple[str, ...]
) -> Any:
    match value:
        case dict():
            return {
                key: _interpolated(inner, environment, path, (*at, str(key)))
                for key, inner in value.items()
            }
        case list():
            return [
                _interpolated(inner, environment, path, (*at, str(n)))
                for n, inner in enumerate(value)
            ]
        case str():
            for name in _VARIABLE.findall(value):
                if name not in environment:
                    raise UsageError(
                        f'pipeline file "{path}" uses ${{{name}}} at {".".join(at)}, '
                        "which is not set",
                        hint=f"Set it in the environment: export {name}=…",
                    )
            return _VARIABLE.sub(lambda found: environment[found[1]], value)
        case _:
            return value


def _misread(path: Path, document: Any, error: ValidationError) -> UsageError:
    """The first thing that is wrong, at its line; pydantic's words, never the value."""
    problems = []
    for each in error.errors(include_input=False, include_url=False):
        keys = [str(key) for key in each["loc"]]
        line = _line_of(document, keys)
        what = each["msg"].removeprefix("Value error, ")
        if each["type"] == "extra_forbidden":
            what = "there is no such key here"
        problems.append(f"line {line}, {'.'.join(keys) or 'the file'}: {what}")
    return UsageError(
        f'pipeline file "{path}" is wrong at {problems[0]}',
        detail=" ".join(f"Also {each}." for each in problems[1:]),
        hint="See docs/reference/pipeline-file.md for what each key takes.",
    )


def _line_of(node: Any, keys: list[str]) -> int:
    line: int = node.start_mark.line + 1
    for key in keys:
        if isinstance(node, yaml.MappingNode):
            for name, value in node.value:
                if name.value == key:
                    line, node = name.start_mark.line + 1, value
                    break
            else:
                return line
        elif isinstance(node, yaml.SequenceNode) and key.isdecimal() and int(key) < len(node.value):
            node = node.value[int(key)]
            line = node.start_mark.line + 1
        else:
            return line
    return line
