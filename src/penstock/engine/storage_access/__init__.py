"""Check whether Spark can read the files of a storage location by itself."""
