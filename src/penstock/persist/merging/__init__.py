"""Merges that do not fit into one process; `spark.py` is the door."""
