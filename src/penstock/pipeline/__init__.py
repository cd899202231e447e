"""The file that says what to move: sources, collections, materializations.

One YAML file describes a pipeline. This room reads it, says at which line and
key it is wrong and what would be right, and puts in what `${NAME}` stands for.
It starts nothing.
"""

from penstock.pipeline.file import Pipeline, SourceSection, load, load_written

__all__ = ["Pipeline", "SourceSection", "load", "load_written"]
