"""Base class of the sections of a pipeline file."""

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationInfo

__all__ = ["FOLDER", "File", "Section"]

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
