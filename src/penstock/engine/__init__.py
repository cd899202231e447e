"""Spark session of Penstock, with the Java runtime and the jars that the session needs.

`spark.py` is the Spark entry module of this package and is imported by name. `java.py` finds a Java
runtime and `jars.py` finds the jars; neither imports PySpark.
"""

from typing import TYPE_CHECKING

from penstock.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from penstock.engine.apply import check_not_running, run
    from penstock.engine.jars import jars_folder, jars_for, kafka_jars, read_pins
    from penstock.engine.java import Java, find_java, launcher_home
    from penstock.engine.preflight import plan_file
    from penstock.engine.teardown import drop_object

__all__ = [
    "Java",
    "check_not_running",
    "drop_object",
    "find_java",
    "jars_folder",
    "jars_for",
    "kafka_jars",
    "launcher_home",
    "plan_file",
    "read_pins",
    "run",
]

if not TYPE_CHECKING:
    # Servers need only the jars and Java. A plan or a run loads the sources.
    __getattr__ = lazy_exports(
        __name__,
        apply=("check_not_running", "run"),
        jars=("jars_folder", "jars_for", "kafka_jars", "read_pins"),
        java=("Java", "find_java", "launcher_home"),
        preflight=("plan_file",),
        teardown=("drop_object",),
    )
