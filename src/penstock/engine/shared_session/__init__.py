"""One Spark session for all tasks of a process, started on demand and restarted when lost."""
