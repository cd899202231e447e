"""Spark session of Penstock, with the Java runtime and the jars that the session needs.

`spark.py` is the Spark entry module of this package and is imported by name. `java.py` finds a Java
runtime and `jars.py` finds the jars; neither imports PySpark.
"""

from penstock.engine.java import Java, find_java, launcher_home

__all__ = ["Java", "find_java", "launcher_home"]
