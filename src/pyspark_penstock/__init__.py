"""Where Spark looks for `format("penstock")`: in packages whose names begin with `pyspark_`."""

from penstock.datasource.spark import PenstockSource as DefaultSource

__all__ = ["DefaultSource"]
