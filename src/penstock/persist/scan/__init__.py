"""Reads of collections by Spark: the scan plan, its Spark tasks and its DataFrame."""
