"""Jars that Spark needs and PySpark does not ship: pinned by hash, resolved once and stored.

A list names every required jar with its version and its SHA-256. A jar without a SHA-256 is not
used. Each jar in the folder of jars (`PENSTOCK_JARS`, or `penstock/jars` in the user's cache) is
verified before each use. Missing jars are resolved by the first of these tools that applies:

    Spark's resolver    if DEFAULT_ARTIFACT_REPOSITORY names a repository
    Maven               if `mvn` is on the PATH, with the mirrors and proxies of its settings
    Spark's resolver    Ivy from PySpark's jars, with `spark.jars.ivySettings` if it is set

Neither tool resolves dependencies: the list is complete. A resolved jar is verified and then
renamed, so another process never sees a part of it. Output of the tools may contain a secret of a
repository URL, so an error quotes only host names from it.

An archive is unpacked next to itself. A manifest, written when it is unpacked, lists the SHA-256 of
each file. The folder is compared with its manifest before each use.
"""

import fcntl
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Final
from xml.sax.saxutils import quoteattr

from penstock.engine.java import find_java, user_cache
from penstock.errors import UsageError
from penstock.telemetry import fields, logger

__all__ = ["Jar", "jars_folder", "jars_for", "kafka_jars", "kafka_list", "read_pins", "unpacked"]

log = logger("engine")

TIMEOUT_S: Final = 900
"""Timeout of a resolver, in seconds; the largest list has 54 MB."""

KAFKA_JARS: Final = "PENSTOCK_KAFKA_JARS"
"""Environment variable that replaces the Kafka jars of the installed PySpark."""

REPOSITORY: Final = "DEFAULT_ARTIFACT_REPOSITORY"
"""Environment variable of Spark that replaces Maven Central."""

_KAFKA_DEPENDENCIES: Final[Mapping[str, tuple[str, ...]]] = {
    # Dependencies of the Kafka connector that PySpark does not ship, by version of Spark.
    "4.1": ("org.apache.kafka:kafka-clients:3.9.1", "org.apache.commons:commons-pool2:2.12.1"),
    "4.2": ("org.apache.kafka:kafka-clients:3.9.2", "org.apache.commons:commons-pool2:2.13.1"),
    "4.3": ("org.apache.kafka:kafka-clients:3.9.2", "org.apache.commons:commons-pool2:2.13.1"),
}

_TESTED_EARLIER: Final[Mapping[str, tuple[str, ...]]] = {
    "4.3": (
        "org.apache.spark:spark-sql-kafka-0-10_2.13:4.2.0",
        "org.apache.spark:spark-token-provider-kafka-0-10_2.13:4.0.0",
    ),
}
"""Jars of earlier Spark versions that pass our tests, by version of Spark."""

_PINS: Final = Path(__file__).with_name("jars.txt")
_SHA256: Final = re.compile("[0-9a-f]{64}")
_COORDINATES: Final = re.compile(r"[\w.-]+:[\w.-]+:[\w.-]+(:[\w.-]+:[\w.-]+)?")


@dataclass(frozen=True, slots=True)
class Jar:
    """Jar, identified by its Maven coordinates."""

    group: str
    name: str
    version: str
    sha256: str | None = None
    """Hash of the file; a jar without one cannot be resolved or used."""

    packaging: str = "jar"
    """File name extension."""

    classifier: str = ""
    """Maven classifier, for a version that has several files."""

    @classmethod
    def of(cls, coordinates: str, sha256: str | None = None) -> "Jar":
        """Parse `group:name:version` or `group:name:version:packaging:classifier`.

        Raises:
            UsageError: the text has another form.
        """
        if not _COORDINATES.fullmatch(coordinates):
            raise UsageError(
                f'coordinates "{coordinates}" of a jar are invalid',
                detail="They have the form group:name:version or "
                "group:name:version:packaging:classifier.",
            )
        group, name, number, *others = coordinates.split(":")
        return cls(group, name, number, sha256, *others)

    @property
    def coordinates(self) -> str:
        """Maven coordinates."""
        others = f":{self.packaging}:{self.classifier}" if self.classifier else ""
        return f"{self.group}:{self.name}:{self.version}{others}"

    @property
    def stem(self) -> str:
        """File name without its extension."""
        return "-".join(filter(None, (self.name, self.version, self.classifier)))

    @property
    def file(self) -> str:
        """File name."""
        return f"{self.stem}.{self.packaging}"

    @property
    def path(self) -> str:
        """Path in a repository."""
        return f"{self.group.replace('.', '/')}/{self.name}/{self.version}/{self.file}"


# Lists of jars.


def kafka_jars() -> list[Path]:
    """Return the jars that the installed PySpark needs to read Kafka.

    If the jars of exactly this version are not available, return earlier jars that pass our tests.

    Raises:
        UsageError: they are neither local nor available; the error names the files to add.
    """
    earlier = _tested_earlier()
    try:
        return jars_for(kafka_list())
    except UsageError:
        if not earlier:
            raise
    files = jars_for(earlier)
    names = ",".join(jar.file for jar in earlier)
    log.info("using Kafka jars of an earlier Spark version", extra=fields(jars=names))
    return files


def kafka_list(spark: str | None = None) -> list[Jar]:
    """Return the jars that a version of Spark (by default the installed one) needs to read Kafka.

    `PENSTOCK_KAFKA_JARS` replaces them, for another distribution of Spark or for a newer client.
    Its value is a comma-separated list of `COORDINATES@SHA256`. The hash of a pinned jar may be
    omitted.

    Raises:
        UsageError: PySpark is not installed, or its version is not supported.
    """
    if spark is None and (replacement := os.environ.get(KAFKA_JARS, "").strip()):
        return _pinned(text.strip() for text in replacement.split(","))
    spark = spark or _installed_spark()
    dependencies = _KAFKA_DEPENDENCIES.get(_minor_version(spark))
    if dependencies is None:
        raise UsageError(
            f'no Kafka jars are listed for PySpark "{spark}"',
            detail=f"Listed versions are {', '.join(_KAFKA_DEPENDENCIES)}.",
            hint=f"Install one of these versions, or name the jars in {KAFKA_JARS}, "
            "as group:name:version@SHA256 with commas between them.",
        )
    connector = "org.apache.spark:spark-sql-kafka-0-10_2.13"
    tokens = "org.apache.spark:spark-token-provider-kafka-0-10_2.13"
    return _pinned((f"{connector}:{spark}", f"{tokens}:{spark}", *dependencies))


def read_pins(file: Path) -> list[Jar]:
    """Return the jars that a file lists: one line per jar, with coordinates and SHA-256."""
    lines = [line.partition("#")[0].split() for line in file.read_text().splitlines()]
    return [Jar.of(*line) for line in lines if line]


def _tested_earlier() -> list[Jar]:
    if os.environ.get(KAFKA_JARS, "").strip():
        return []
    minor = _minor_version(_installed_spark())
    earlier = _TESTED_EARLIER.get(minor)
    return _pinned((*earlier, *_KAFKA_DEPENDENCIES[minor])) if earlier else []


def _pinned(texts: Iterable[str]) -> list[Jar]:
    """Return the jars that `COORDINATES` or `COORDINATES@SHA256` name, with the pinned hashes."""
    pins = {jar.coordinates: jar for jar in read_pins(_PINS)}
    jars = []
    for text in texts:
        coordinates, separator, sha256 = text.partition("@")
        pin = pins.get(coordinates)
        if separator and (not _SHA256.fullmatch(sha256) or (pin and pin.sha256 != sha256)):
            raise UsageError(
                f'hash of jar "{coordinates}" is not its SHA-256',
                detail=f"The SHA-256 of this jar is {pin.sha256}."
                if pin
                else "A SHA-256 has 64 lower-case hexadecimal digits.",
                hint=f"Correct the hash in {KAFKA_JARS}. To compute it: sha256sum FILE",
            )
        jars.append(pin or Jar.of(coordinates, sha256 or None))
    return jars


def _installed_spark() -> str:
    try:
        return version("pyspark")
    except PackageNotFoundError as error:
        raise UsageError(
            "PySpark is not installed",
            detail="The version of the Kafka jars depends on the version of PySpark.",
            hint=f"Install PySpark, or name the jars in {KAFKA_JARS}.",
        ) from error


def _minor_version(spark: str) -> str:
    return ".".join(spark.split(".")[:2])


# The folder of jars.


def jars_folder() -> Path:
    """Return the folder of jars: `PENSTOCK_JARS`, or a folder in the user's cache."""
    folder = os.environ.get("PENSTOCK_JARS")
    return Path(folder).absolute() if folder else user_cache() / "penstock" / "jars"


def jars_for(jars: Iterable[Jar]) -> list[Path]:
    """Return the files of these jars; resolve the missing ones.

    Raises:
        UsageError: a jar is neither local nor available; the error names the files to add.
    """
    jars = list(jars)
    for jar in jars:
        if jar.sha256 is None:
            raise UsageError(
                f'jar "{jar.coordinates}" has no SHA-256 to verify it by',
                detail="The jar is not in the list of pinned jars, and no hash is given.",
                hint=f"Name all jars in {KAFKA_JARS}, this one as {jar.coordinates}@SHA256. "
                "To compute the hash of a file that you trust: sha256sum FILE",
            )
    folder = jars_folder()
    if _missing(jars):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _locked(folder / ".lock"):
            if missing := _missing(jars):
                _resolve(missing, folder)
    return [folder / jar.file for jar in jars]


def unpacked(archive: Jar) -> Path:
    """Return the folder of an unpacked archive; resolve and unpack the archive if needed.

    Raises:
        UsageError: it is neither local nor available; the error names the file to add.
    """
    folder = jars_folder() / archive.stem
    partial = folder.with_name(f".{archive.stem}")
    manifest = folder.with_name(f".{archive.stem}.{archive.sha256}.manifest")
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _locked(folder.with_name(f".{archive.stem}.lock")):
        if not _matches(folder, manifest):
            (file,) = jars_for([archive])
            for stale in (partial, folder):
                shutil.rmtree(stale, ignore_errors=True)
            with tarfile.open(file) as packed:
                packed.extractall(partial, filter="data")
            manifest.write_text(_hashes(partial))
            partial.rename(folder)
    return folder


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Hold a lock in the block. The kernel releases the lock of a killed process."""
    with file.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _missing(jars: Iterable[Jar]) -> list[Jar]:
    return [jar for jar in jars if _sha256(jars_folder() / jar.file) != jar.sha256]


def _sha256(file: Path) -> str | None:
    try:
        with file.open("rb") as content:
            return hashlib.file_digest(content, "sha256").hexdigest()
    except OSError:
        return None


def _matches(folder: Path, manifest: Path) -> bool:
    """Return whether a folder holds exactly the files that its manifest lists."""
    try:
        matches = manifest.read_text() == _hashes(folder)
    except OSError:
        return False
    if not matches:
        log.warning("unpacked files were changed; unpacking again", extra=fields(folder=folder))
    return matches


def _hashes(folder: Path) -> str:
    """Return a line for each path below a folder, with the hash of a file or target of a link."""
    lines = []
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            lines.append(f"link {os.readlink(path)} {path.relative_to(folder)}")  # noqa: PTH115
        elif path.is_file():
            lines.append(f"{_sha256(path)} {path.relative_to(folder)}")
    return "\n".join(lines)


# Resolvers.


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
        output = _run(_maven_command(mvn, jars, work) if mvn else _ivy_command(jars, work))
        for jar in jars:
            files = list(work.rglob(jar.file))
            for file in files:
                if _sha256(file) == jar.sha256:
                    file.chmod(0o644)
                    file.replace(folder / jar.file)
            if files and not (folder / jar.file).exists():
                output = f"file {jar.file} does not have the pinned SHA-256"
    if missing := _missing(jars):
        wrong = [jar.file for jar in missing if (folder / jar.file).exists()]
        raise UsageError(
            f'could not resolve jar "{missing[0].coordinates}"',
            detail=f"{resolver} reported: {output}."
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


_POM: Final = """\
<project>
  <modelVersion>4.0.0</modelVersion>
  <groupId>penstock</groupId><artifactId>jars</artifactId><version>1</version>
  <dependencies>{dependencies}</dependencies>
</project>
"""

_POM_DEPENDENCY: Final = """
    <dependency>
      <groupId>{jar.group}</groupId><artifactId>{jar.name}</artifactId>
      <version>{jar.version}</version><type>{jar.packaging}</type>
      <classifier>{jar.classifier}</classifier>
      <exclusions>
        <exclusion><groupId>*</groupId><artifactId>*</artifactId></exclusion>
      </exclusions>
    </dependency>
"""

_COPY: Final = "org.apache.maven.plugins:maven-dependency-plugin:3.6.1:copy-dependencies"


def _maven_command(mvn: str, jars: Iterable[Jar], work: Path) -> list[str]:
    pom = work / "pom.xml"
    dependencies = "".join(_POM_DEPENDENCY.format(jar=jar) for jar in jars)
    pom.write_text(_POM.format(dependencies=dependencies))
    # Without --update-snapshots, Maven does not request a jar again that was missing before.
    return [
        *(mvn, "--batch-mode", "--update-snapshots", f"--file={pom}"),
        *(_COPY, f"-DoutputDirectory={work / 'out'}"),
    ]


_IVY: Final = """\
<ivy-module version="2.0" xmlns:m="http://ant.apache.org/ivy/extra">
  <info organisation="penstock" module="jars"/>
  <dependencies>{dependencies}</dependencies>
</ivy-module>
"""

_IVY_DEPENDENCY: Final = """
    <dependency org="{jar.group}" name="{jar.name}" rev="{jar.version}" transitive="false">
      <artifact name="{jar.name}" type="{jar.packaging}" ext="{jar.packaging}" {classifier}/>
    </dependency>
"""

_IVY_SETTINGS: Final = """\
<ivysettings>
  <property name="ivy.checksums" value=""/>
  <settings defaultResolver="all"/>
  <resolvers>
    <chain name="all" returnFirst="true">
      <filesystem name="local" m2compatible="true"><artifact pattern={pattern}/></filesystem>
      <ibiblio name="central" m2compatible="true" usepoms="false" {root}/>
    </chain>
  </resolvers>
</ivysettings>
"""

_PATTERN: Final = (
    ".m2/repository/[organisation]/[module]/[revision]/[artifact]-[revision](-[classifier]).[ext]"
)


def _ivy_command(jars: Iterable[Jar], work: Path) -> list[str]:
    module = work / "ivy.xml"
    dependencies = "".join(
        _IVY_DEPENDENCY.format(
            jar=jar, classifier=f'm:classifier="{jar.classifier}"' if jar.classifier else ""
        )
        for jar in jars
    )
    module.write_text(_IVY.format(dependencies=dependencies))
    settings = _spark_setting("spark.jars.ivySettings")
    if settings is None:
        # The repositories of Spark's resolver, without the POMs: the list is complete.
        url = os.environ.get(REPOSITORY)
        root = f"root={quoteattr(url)}" if url else ""
        pattern = quoteattr(str(Path.home() / _PATTERN))
        settings = str(work / "settings.xml")
        Path(settings).write_text(_IVY_SETTINGS.format(pattern=pattern, root=root))
    # JVM options of spark-submit: a proxy or a trust store, for example.
    options = shlex.split(os.environ.get("SPARK_SUBMIT_OPTS", ""))
    # Without the other jars, Ivy uses the HTTP client of Java, which reports refused connections.
    classes = ":".join(map(str, (_pyspark() / "jars").glob("ivy-*.jar")))
    return [
        *(str(find_java().program), *options, "-cp", classes, "org.apache.ivy.Main"),
        *("-settings", settings, "-ivy", str(module), "-cache", str(work / "cache")),
    ]


def _spark_setting(name: str) -> str | None:
    """Return a setting of spark-defaults.conf."""
    folder = Path(os.environ.get("SPARK_CONF_DIR") or _pyspark() / "conf")
    try:
        text = (folder / "spark-defaults.conf").read_text()
    except OSError:
        return None
    values = re.findall(rf"^\s*{re.escape(name)}(?:\s*[=:]\s*|\s+)(\S.*?)\s*$", text, re.MULTILINE)
    return values[-1] if values else None


def _pyspark() -> Path:
    spec = find_spec("pyspark")
    if spec is None or not spec.submodule_search_locations:
        raise UsageError(
            "neither Maven nor PySpark is installed",
            detail="One of them is needed to resolve jars.",
            hint="Install one: apt-get install maven, or pip install pyspark",
        )
    return Path(spec.submodule_search_locations[0])
