"""Whether Spark can reach the files of a location by itself."""
