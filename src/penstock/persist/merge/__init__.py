"""Compaction: batches merged into fewer rows and fewer files."""
