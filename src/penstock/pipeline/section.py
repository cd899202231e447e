"""Base class of the sections of a pipeline file."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, GetPydanticSchema, ValidationInfo
from pydantic_core import core_schema

__all__ = ["FOLDER", "File", "Section", "with_config"]

FOLDER = "folder"
"""Context key of a validation: the folder of the pipeline file."""


def _from_folder(path: Path, info: ValidationInfo) -> Path:
    return Path((info.context or {}).get(FOLDER, ""), path).absolute()


File = Annotated[Path, AfterValidator(_from_folder)]
"""A path relative to the folder of the pipeline file."""


class Section(BaseModel):
    """A mapping with a fixed set of keys; immutable."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        arbitrary_types_allowed=True,
        use_attribute_docstrings=True,
    )


S = TypeVar("S", bound=BaseModel)


def with_config(section: type[S], build: Callable[[S], Any]) -> Any:
    """Return a type that is validated as `section` and then converted by `build`."""
    return Annotated[
        Any,
        GetPydanticSchema(
            lambda _, handler: core_schema.no_info_after_validator_function(
                build, handler.generate_schema(section)
            )
        ),
    ]
