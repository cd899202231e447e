"""Many documents into one.

A JSON schema says, at each location, how a value follows the one before it: the last one
wins, they are summed, merged, appended. This room reads those annotations and folds
documents by them, in source order and exactly.

    document     JSON without loss, its order, pointers into it
    strategy     what an annotation can say
    annotation   which strategy applies where, found by validating a document
    apply        two values become one
    reducer      the documents of one key: combine changes, or reduce them into what is stored
    combine      the same for many keys, over Arrow
    inference    what a schema says of a location, before there is a document
    columns      which fields need none of this, and can be aggregated as typed columns
    native       whether all of a collection's can, and by which aggregates

Everything is a function from values to values.
"""

from penstock.reduce.columns import Column, check_key, columns_of, single_scalar
from penstock.reduce.combine import COMBINED, REDUCED, Combiner, combine_rows, reduce_rows
from penstock.reduce.document import ABSENT, decode, encode
from penstock.reduce.reducer import Reduced, Reducer

__all__ = [
    "ABSENT",
    "COMBINED",
    "REDUCED",
    "Column",
    "Combiner",
    "Reduced",
    "Reducer",
    "check_key",
    "columns_of",
    "combine_rows",
    "decode",
    "encode",
    "reduce_rows",
    "single_scalar",
]
