"""Jars that Spark needs and PySpark does not ship: pinned by hash, resolved once and stored.

A list names every required jar with its version and its SHA-256. Each jar in the folder of jars
(`PENSTOCK_JARS`, or `penstock/jars` in the user's cache) is verified before each use. Missing jars
are resolved by the first of these tools that applies:

    Spark's resolver    if DEFAULT_ARTIFACT_REPOSITORY names a repository
    Maven               if `mvn` is on the PATH, with the mirrors and proxies of its settings
    Spark's resolver    Ivy from PySpark's jars, with `spark.jars.ivySettings` if it is set

Neither tool resolves dependencies: the list is complete. A resolved jar is verified and then
renamed, so another process never sees a part of it. Output of the tools may contain a secret of a
repository URL, so an error quotes only host names from it.
"""

import fcntl
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from penstock.engine.java import find_java, user_cache
from penstock.errors import UsageError
from penstock.telemetry import fields, logger

__all__ = ["Jar", "jars_folder", "jars_for", "kafka_jars", "kafka_list", "read_pins"]

log = logger("engine")

TIMEOUT_S: Final = 900
"""Timeout of a resolver, in seconds; the largest list has 54 MB."""

KAFKA_JARS: Final = "PENSTOCK_KAFKA_JARS"
"""Environment variable that replaces the Kafka jars of the installed PySpark."""

REPOSITORY: Final = "DEFAULT_ARTIFACT_REPOSITORY"
"""Environment variable of Spark that replaces Maven Central."""

_PINS: Final = Path(__file__).with_name("jars.txt")
_COORDINATES: Final = re.compile(r"[\w.-]+:[\w.-]+:[\w.-]+(:[\w.-]+:[\w.-]+)?")


@dataclass(frozen=True, slots=True)
class Jar:
    """Jar, identified by its Maven coordinates and by its hash."""

    group: str
    name: str
    version: str
    packaging: str
    """File name extension."""

    classifier: str
    """Maven classifier, or empty."""

    sha256: str
    spark: tuple[str, ...] = ()
    """Versions of Spark that need the jar, such as `4.1.0`, or `4.1` for all of its patches."""

    @classmethod
    def of(cls, coordinates: str, sha256: str, *spark: str) -> "Jar":
        """Parse `group:name:version` or `group:name:version:packaging:classifier`.

        Raises:
            UsageError: the text has another form, or the hash is not a SHA-256.
        """
        if not _COORDINATES.fullmatch(coordinates):
            raise UsageError(
                f'coordinates "{coordinates}" of a jar are invalid',
                detail="They have the form group:name:version or "
                "group:name:version:packaging:classifier.",
            )
        if not re.fullmatch("[0-9a-f]{64}", sha256):
            raise UsageError(
                f'jar "{coordinates}" has no SHA-256 to verify it by',
                detail="The jar is not in the list of pinned jars, and no hash with 64 lower-case "
                "hexadecimal digits is given.",
                hint=f"Name all jars in {KAFKA_JARS}, this one as {coordinates}@SHA256. "
                "To compute the hash of a file that you trust: sha256sum FILE",
            )
        group, name, number, *others = coordinates.split(":")
        packaging, classifier = others or ("jar", "")
        return cls(group, name, number, packaging, classifier, sha256, spark)

    @property
    def coordinates(self) -> str:
        """Maven coordinates."""
        others = f":{self.packaging}:{self.classifier}" if self.classifier else ""
        return f"{self.group}:{self.name}:{self.version}{others}"

    @property
    def file(self) -> str:
        """File name."""
        stem = "-".join(filter(None, (self.name, self.version, self.classifier)))
        return f"{stem}.{self.packaging}"

    @property
    def path(self) -> str:
        """Path in a repository."""
        return f"{self.group.replace('.', '/')}/{self.name}/{self.version}/{self.file}"


def read_pins(file: Path) -> list[Jar]:
    """Return the jars that a file lists.

    A line has the coordinates of a jar, its SHA-256, and the versions of Spark that need it.
    """
    lines = [line.partition("#")[0].split() for line in file.read_text().splitlines()]
    return [Jar.of(*line) for line in lines if line]


def kafka_jars() -> list[Path]:
    """Return the jars that the installed PySpark needs to read Kafka.

    `PENSTOCK_KAFKA_JARS` replaces them, for another distribution of Spark or for a newer client.
    Its value is a comma-separated list of `COORDINATES@SHA256`. The hash of a pinned jar may be
    omitted.

    Raises:
        UsageError: they are neither local nor available; the error names the files to add.
    """
    if replacement := os.environ.get(KAFKA_JARS, "").strip():
        return jars_for(_parse(replacement))
    return jars_for(kafka_list(version("pyspark")))


def kafka_list(spark: str) -> list[Jar]:
    """Return the pinned jars that a version of Spark needs to read Kafka.

    Raises:
        UsageError: the version is not listed.
    """
    pins = read_pins(_PINS)
    listed = [
        number for jar in pins if jar.name.startswith("spark-sql-kafka") for number in jar.spark
    ]
    names = {spark, ".".join(spark.split(".")[:2])}
    if names.isdisjoint(listed):
        raise UsageError(
            f'no Kafka jars are listed for PySpark "{spark}"',
            detail=f"Listed versions are {', '.join(listed)}.",
            hint=f"Install one of these versions, or name the jars in {KAFKA_JARS}, "
            "as group:name:version@SHA256 with commas between them.",
        )
    return [jar for jar in pins if not names.isdisjoint(jar.spark)]


def _parse(replacement: str) -> list[Jar]:
    pins = {jar.coordinates: jar.sha256 for jar in read_pins(_PINS)}
    jars = []
    for text in replacement.split(","):
        coordinates, _, sha256 = text.strip().partition("@")
        jars.append(Jar.of(coordinates, sha256 or pins.get(coordinates, "")))
    return jars


def jars_folder() -> Path:
    """Return the folder of jars: `PENSTOCK_JARS`, or a folder in the user's cache."""
    folder = os.environ.get("PENSTOCK_JARS")
    return Path(folder).absolute() if folder else user_cache() / "penstock" / "jars"


def jars_for(jars: Sequence[Jar]) -> list[Path]:
    """Return the files of these jars; resolve the missing ones.

    Raises:
        UsageError: a jar is neither local nor available; the error names the files to add.
    """
    folder = jars_folder()
    if _missing(jars, folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # The kernel releases the lock of a killed process.
        with (folder / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if missing := _missing(jars, folder):
                _resolve(missing, folder)
    return [folder / jar.file for jar in jars]


def _missing(jars: Sequence[Jar], folder: Path) -> list[Jar]:
    return [jar for jar in jars if _sha256(folder / jar.file) != jar.sha256]


def _sha256(file: Path) -> str | None:
    try:
        with file.open("rb") as content:
            return hashlib.file_digest(content, "sha256").hexdigest()
    except OSError:
        return None


def _resolve(jars: Sequence[Jar], folder: Path) -> None:
    """Add these jars to the folder.

    Raises:
        UsageError: a jar is not available.
    """
    mvn = None if os.environ.get(REPOSITORY) else shutil.which("mvn")
    resolver = "Maven" if mvn else "Spark's resolver"
    names = ",".join(jar.coordinates for jar in jars)
    log.info("resolving jars", extra=fields(jars=names, resolver=resolver))
    with tempfile.TemporaryDirectory(prefix=".resolve-", dir=folder) as name:
        work = Path(name)
        reason = _run(_maven_command(mvn, jars, work) if mvn else _ivy_command(jars, work))
        for jar in jars:
            for file in list(work.rglob(jar.file)):
                if _sha256(file) == jar.sha256:
                    file.chmod(0o644)
                    file.replace(folder / jar.file)
                else:
                    reason = f"file {jar.file} does not have the pinned SHA-256"
    if missing := _missing(jars, folder):
        wrong = [jar.file for jar in missing if (folder / jar.file).exists()]
        raise UsageError(
            f'could not resolve jar "{missing[0].coordinates}"',
            detail=f"{resolver} reported: {reason}."
            + (f" Files with another hash in the folder: {', '.join(wrong)}." if wrong else ""),
            hint=f'Put these files of a Maven repository into folder "{folder}", or name another '
            f"folder in PENSTOCK_JARS, or a repository in {REPOSITORY}: "
            f"{', '.join(jar.path for jar in missing)}",
        )


def _run(command: Sequence[str]) -> str:
    """Run a resolver; return the reason of its first failure, without URLs."""
    try:
        process = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"no result within {TIMEOUT_S} s"
    except OSError as error:
        return f"it cannot be run: {error.strerror}"
    output = process.stdout.decode(errors="replace")
    for pattern in _REASONS:
        if reason := re.search(pattern, output, re.MULTILINE):
            return _URL.sub(lambda url: url["host"], reason[0]).strip().rstrip(".")
    return f"exit status {process.returncode}"


_REASONS: Final = (
    r"Could not (?:find|transfer) artifact.*?(?= -> |$)",
    r"Server access error.*",
    r"\S+#\S+: not found",
)
"""Failures in the output of Maven and of Ivy, the most specific first."""

_URL: Final = re.compile(r"\w+://(?:\S*@)?(?P<host>[^\s/?#()]*)[^\s()]*")

_MAVEN_PLUGIN: Final = "org.apache.maven.plugins", "maven-dependency-plugin", "2.10"
"""Last release of the plugin that copies an artifact without its POM and the parents of that."""

_POM: Final = """
<project>
  <modelVersion>4.0.0</modelVersion>
  <groupId>penstock</groupId><artifactId>jars</artifactId><version>1</version>
  <packaging>pom</packaging>
  <build><plugins><plugin>
    <groupId>{}</groupId><artifactId>{}</artifactId><version>{}</version>
    <configuration><artifactItems>{}</artifactItems></configuration>
  </plugin></plugins></build>
</project>
"""

_POM_ARTIFACT: Final = """
<artifactItem>
  <groupId>{0.group}</groupId><artifactId>{0.name}</artifactId><version>{0.version}</version>
  <type>{0.packaging}</type><classifier>{0.classifier}</classifier>
</artifactItem>
"""

_IVY: Final = """
<ivy-module version="2.0" xmlns:m="http://ant.apache.org/ivy/extra">
  <info organisation="penstock" module="jars"/>
  <dependencies>{}</dependencies>
</ivy-module>
"""

_IVY_DEPENDENCY: Final = """
<dependency org="{0.group}" name="{0.name}" rev="{0.version}" transitive="false">
  <artifact name="{0.name}" type="{0.packaging}" ext="{0.packaging}" m:classifier="{0.classifier}"/>
</dependency>
"""


def _maven_command(mvn: str, jars: Sequence[Jar], work: Path) -> list[str]:
    pom = work / "pom.xml"
    artifacts = "".join(map(_POM_ARTIFACT.format, jars))
    pom.write_text(_POM.format(*_MAVEN_PLUGIN, artifacts))
    # Without --update-snapshots, Maven does not request a jar again that was missing before.
    return [
        *(mvn, "--batch-mode", "--update-snapshots", f"--file={pom}"),
        f"{':'.join(_MAVEN_PLUGIN)}:copy",
        f"-DoutputDirectory={work / 'out'}",
    ]


def _ivy_command(jars: Sequence[Jar], work: Path) -> list[str]:
    spec = find_spec("pyspark")
    if spec is None or not spec.submodule_search_locations:
        raise UsageError(
            "neither Maven nor PySpark is installed",
            detail="One of them is needed to resolve jars.",
            hint="Install one: apt-get install maven, or pip install pyspark",
        )
    pyspark = Path(spec.submodule_search_locations[0])
    module = work / "ivy.xml"
    module.write_text(_IVY.format("".join(map(_IVY_DEPENDENCY.format, jars))))
    own_settings = Path(__file__).with_name("ivysettings.xml")
    settings = _ivy_settings(Path(os.environ.get("SPARK_CONF_DIR") or pyspark / "conf"))
    # JVM options of spark-submit: a proxy or a trust store, for example.
    options = shlex.split(os.environ.get("SPARK_SUBMIT_OPTS", ""))
    # Without the other jars, Ivy uses the HTTP client of Java, which reports refused connections.
    classes = ":".join(map(str, (pyspark / "jars").glob("ivy-*.jar")))
    return [
        *(str(find_java().program), *options, "-cp", classes),
        f"-Dpenstock.resolver={'mirror' if os.environ.get(REPOSITORY) else 'central'}",
        *("org.apache.ivy.Main", "-settings", settings or str(own_settings)),
        *("-ivy", str(module), "-cache", str(work / "cache")),
    ]


def _ivy_settings(folder: Path) -> str | None:
    """Return `spark.jars.ivySettings` of spark-defaults.conf, or None."""
    try:
        text = (folder / "spark-defaults.conf").read_text()
    except OSError:
        return None
    setting = r"^\s*spark\.jars\.ivySettings(?:\s*[=:]\s*|\s+)(\S.*?)\s*$"
    return next(reversed(re.findall(setting, text, re.MULTILINE)), None)
