"""Writing by Spark's tasks: files under a staging id, then one commit by the driver."""
