"""`format("penstock")`: collections as a Spark data source, batch and stream.

Spark runs a Python data source in several processes: one creates it, one plans, one follows
a stream, many read. Every object is therefore a value that can be pickled, or belongs to one
process:

    options         user options, parsed
    batch_plan      read tasks and hold of a batch read     (one process, per plan)
    stream_offsets  offsets and admission of a stream       (pure)
    follower        position of a stream in a collection    (one process, per query)
    read_task       rows of one Spark task, with Arrow      (many processes)
    filters         filters that Spark pushes down          (many processes)
    spark           Spark's classes around these modules
    append          `df.write.format("penstock")`
"""
