"""What runs the work: the Spark session, and the Java and the jars that it needs.

`spark.py` is this room's Spark door and is imported by name; `java.py` finds a
Java and `jars.py` the jars without it.
"""

from penstock.engine.java import Java, find_java, launcher_home

__all__ = ["Java", "find_java", "launcher_home"]
