"""One Spark session for all tasks of a process, started when needed and again when lost."""
