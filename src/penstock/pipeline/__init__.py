"""The pipeline file: sources, collections and materializations.

One YAML file describes a pipeline. This package parses it, reports invalid values with their
line, key and valid form, and substitutes `${NAME}`.
"""

from penstock.pipeline.file import (
    CATALOG,
    BindingSection,
    CollectionSection,
    ConnectorSection,
    MaterializationSection,
    Pipeline,
    SourceSection,
    load,
    load_unresolved,
)
from penstock.pipeline.json_schema import file_schema
from penstock.pipeline.yaml_text import VARIABLE, UnsetVariable, escape, substitute

__all__ = [
    "CATALOG",
    "VARIABLE",
    "BindingSection",
    "CollectionSection",
    "ConnectorSection",
    "MaterializationSection",
    "Pipeline",
    "SourceSection",
    "UnsetVariable",
    "escape",
    "file_schema",
    "load",
    "load_unresolved",
    "substitute",
]
