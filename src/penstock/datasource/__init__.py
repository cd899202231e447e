"""`format("penstock")`: collections for Spark's own readers, batch and stream.

Spark runs a Python data source in processes of its own: one makes it, one
plans, one follows a stream, many read. So everything here is a value that
travels between them, or belongs to one process and is named after what that
process does:

    options.py    what the user asked for
    contents.py   planning a batch reading                 (a process, for a moment)
    stream.py     offsets, and how much to admit           (pure)
    follow.py     following a collection                   (a process, as long as the query)
    reading.py    what one task reads, added up in Arrow   (many processes)
    filters.py    conditions on rows that Spark hands down (the same)
    spark.py      the door: Spark's classes around these
"""
