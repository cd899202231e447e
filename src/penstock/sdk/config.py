"""Configuration: pydantic models, their JSON schemas, and errors that point at a key."""

import json
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from penstock.errors import UsageError

__all__ = ["json_schema", "parse"]

_M = TypeVar("_M", bound=BaseModel)


def json_schema(model: type[BaseModel]) -> str:
    """The JSON schema of what `parse` takes."""
    return json.dumps(model.model_json_schema(), separators=(",", ":"))


def parse(model: type[_M], text: str, what: str) -> _M:
    """The configuration in `text`.

    Raises:
        UsageError: it does not fit; which key, and why. No value is told: it may be a secret.
    """
    try:
        return model.model_validate_json(text or "{}")
    except ValidationError as error:
        found = error.errors(include_input=False, include_url=False)
        problems = "; ".join(
            f"{'.'.join(map(str, each['loc'])) or 'it'}: {each['msg'].lower()}" for each in found
        )
        raise UsageError(
            f"configuration of {what} does not fit: {problems}",
            hint=f"It has the keys {', '.join(model.model_json_schema().get('properties', {}))}.",
        ) from None
