pytest_plugins = [
    "tests.fix_hypothesis",
    "tests.fix_kafka",
    "tests.fix_objects",
    "tests.fix_postgres",
    "tests.fix_scripts",
    "tests.fix_spark",
    "tests.fix_strace",
    "tests.fix_timing",
]
