"""Configuration of endpoints and resources: JSON schemas and parsing."""

import json
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from penstock.errors import UsageError

__all__ = ["json_schema", "parse"]

_M = TypeVar("_M", bound=BaseModel)


def json_schema(model: type[BaseModel]) -> str:
    """Return the JSON schema of a configuration."""
    return json.dumps(model.model_json_schema(), separators=(",", ":"))


def parse(model: type[_M], text: str, name: str) -> _M:
    """Parse a configuration. Errors call it `name`.

    Raises:
        UsageError: a key is invalid. The message has no values, because they may be secrets.
    """
    try:
        return model.model_validate_json(text or "{}")
    except ValidationError as error:
        errors = error.errors(include_input=False, include_url=False)
        problems = "; ".join(
            f"{'.'.join(map(str, entry['loc'])) or 'configuration'}: {entry['msg'].lower()}"
            for entry in errors
        )
        keys = ", ".join(model.model_json_schema().get("properties", {}))
        raise UsageError(
            f"configuration of {name} is invalid: {problems}",
            hint=f"The valid keys are {keys}.",
        ) from None
