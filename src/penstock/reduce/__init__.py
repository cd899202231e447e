"""Reductions of JSON documents by the `reduce` annotations of their schema.

A JSON schema states at each location how a new value combines with the previous one: the
last value wins, values are summed, merged or appended. This package reads the annotations
and reduces documents in source order, exactly.

    document       lossless JSON, its order, JSON pointers
    strategy       the strategies of an annotation
    annotation     strategies of one document, from its validation
    apply          reduction of two values
    reducer        documents of one key: combine changes, or reduce them into the stored one
    combine        the same for many keys, over Arrow
    inference      types and presence of a location, derived from the schema alone
    columns        fields that can be aggregated as typed columns
    native         collections that Spark can aggregate completely

All functions are pure.
"""

from penstock.reduce.annotation import Schema
from penstock.reduce.columns import Column, check_key, columns_of, single_scalar
from penstock.reduce.combine import COMBINED, REDUCED, Combiner, combine_rows, reduce_rows
from penstock.reduce.document import ABSENT, Absent, Pointer, decode, encode, find, parse_pointer
from penstock.reduce.inference import Outline
from penstock.reduce.native import INTEGER, Aggregate, NativePlan, native_plan
from penstock.reduce.reducer import Reduced, Reducer

__all__ = [
    "ABSENT",
    "COMBINED",
    "INTEGER",
    "REDUCED",
    "Absent",
    "Aggregate",
    "Column",
    "Combiner",
    "NativePlan",
    "Outline",
    "Pointer",
    "Reduced",
    "Reducer",
    "Schema",
    "check_key",
    "columns_of",
    "combine_rows",
    "decode",
    "encode",
    "find",
    "native_plan",
    "parse_pointer",
    "reduce_rows",
    "single_scalar",
]
