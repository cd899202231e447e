"""What every section of a pipeline's file is."""

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationInfo

__all__ = ["FOLDER", "File", "Section"]

FOLDER = "folder"
"""What the context of a validation calls the folder of the pipeline's file."""


def _from_folder(path: Path, info: ValidationInfo) -> Path:
    return Path((info.context or {}).get(FOLDER, ""), path).absolute()


File = Annotated[Path, AfterValidator(_from_folder)]
"""A file, named from the folder of the pipeline's."""


class Section(BaseModel):
    """A mapping whose keys are known, and whose values do not change."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        arbitrary_types_allowed=True,
        use_attribute_docstrings=True,
    )
