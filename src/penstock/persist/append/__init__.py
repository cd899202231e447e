"""Writes by Spark: DataFrames appended to collections."""
