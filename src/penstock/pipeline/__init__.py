"""The pipeline file: sources, collections and materializations.

One YAML file describes a pipeline. This package parses it, reports invalid values with their
line, key and valid form, and substitutes `${NAME}`.
"""

from penstock.pipeline.file import Pipeline, SourceSection, load, load_unresolved

__all__ = ["Pipeline", "SourceSection", "load", "load_unresolved"]
