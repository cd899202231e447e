"""Reads of collections by Spark: the plan, its tasks and its DataFrame."""
