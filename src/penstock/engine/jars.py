"""Jars that Spark needs and PySpark does not ship: found locally, or downloaded once and stored.

A list of jars is closed: it names every required jar with its version and its SHA-256. A jar
without a SHA-256 is not used. Nothing is resolved at run time, so an error message can name the
required files and their folder without network access. A jar is taken from the first of these
places that has it:

    the folder of jars      PENSTOCK_JARS, or `penstock/jars` in the user's cache
    Maven's own folder      ~/.m2/repository, or the folder in Maven's settings
    a repository            DEFAULT_ARTIFACT_REPOSITORY, as for Spark itself; else a mirror of
                            Maven's settings; else the default of Spark's own resolver

Python alone downloads the files, with the certificates and the proxy that pip uses. Java has its
own trust and proxy settings, and resolving poms leads to other hosts. A jar is written under a
temporary name and then renamed, so several processes may download it at the same time.

An archive of many jars, such as a complete program, is stored in the same way and unpacked next to
itself. A manifest, written when it is unpacked, lists the SHA-256 of each file. The folder is
compared with its manifest before each use.
"""

import base64
import fcntl
import hashlib
import os
import re
import shutil
import tarfile
import tempfile
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from http.client import HTTPException
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit
from urllib.response import addinfourl
from xml.etree import ElementTree

from penstock.engine.java import user_cache
from penstock.errors import UsageError
from penstock.telemetry import fields, logger

__all__ = ["Jar", "jars_folder", "jars_for", "kafka_jars", "kafka_list", "read_pins", "unpacked"]

log = logger("engine")

PATIENCE_S: Final = 60
"""Timeout of a silent repository, in seconds."""

KAFKA_JARS: Final = "PENSTOCK_KAFKA_JARS"
"""Environment variable that replaces the Kafka jars of the installed PySpark."""

_BESIDE_KAFKA: Final[Mapping[str, tuple[str, ...]]] = {
    # Jars that the connector needs and PySpark does not ship, by version of Spark. PySpark ships
    # its other dependencies: scala-parallel-collections, jsr305, spark-tags, and for the client
    # lz4-java, snappy-java, zstd-jni and slf4j-api.
    "4.1": ("org.apache.kafka:kafka-clients:3.9.1", "org.apache.commons:commons-pool2:2.12.1"),
    "4.2": ("org.apache.kafka:kafka-clients:3.9.2", "org.apache.commons:commons-pool2:2.13.1"),
    "4.3": ("org.apache.kafka:kafka-clients:3.9.2", "org.apache.commons:commons-pool2:2.13.1"),
}

_TRIED: Final[Mapping[str, tuple[str, ...]]] = {
    "4.3": (
        "org.apache.spark:spark-sql-kafka-0-10_2.13:4.2.0",
        "org.apache.spark:spark-token-provider-kafka-0-10_2.13:4.0.0",
    ),
}
"""Jars of older Spark versions that pass our tests, by version of Spark."""

_SHA256: Final = re.compile("[0-9a-f]{64}")
_COORDINATES: Final = re.compile(r"[\w.-]+:[\w.-]+:[\w.-]+(:[\w.-]+:[\w.-]+)?")


@dataclass(frozen=True, slots=True)
class Jar:
    """Jar, identified by its Maven coordinates."""

    group: str
    name: str
    version: str
    sha256: str | None = None
    """Hash of the file; a jar without one cannot be fetched or used."""

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
                f'jar "{coordinates}" cannot be looked for',
                detail="The coordinates of a jar are group:name:version, and perhaps "
                ":packaging:classifier.",
            )
        group, name, number, *more = coordinates.split(":")
        return cls(group, name, number, sha256, *more)

    @property
    def coordinates(self) -> str:
        """Maven coordinates."""
        more = f":{self.packaging}:{self.classifier}" if self.classifier else ""
        return f"{self.group}:{self.name}:{self.version}{more}"

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


def kafka_jars() -> list[Path]:
    """Return the jars that the installed PySpark needs to read Kafka.

    If the jars of exactly this version are not available, return older jars that pass our tests.

    Raises:
        UsageError: they are neither local nor available; the error names the files to add.
    """
    wanted, others = kafka_list(), _tried_instead()
    if others and _here(others) and not _here(wanted):
        return jars_for(others)  # Same choice as the last time, with or without a network.
    try:
        return jars_for(wanted)
    except UsageError:
        if not others:
            raise
    found = jars_for(others)
    log.warning(
        "jars of this very Spark cannot be had; others are used, which were tried with it",
        extra=fields(jars=",".join(jar.file for jar in others)),
    )
    return found


def kafka_list(spark: str | None = None) -> list[Jar]:
    """Return the jars that a version of Spark (by default the installed one) needs to read Kafka.

    `PENSTOCK_KAFKA_JARS` replaces them, for another distribution of Spark or for a newer client.
    Its value is a comma-separated list of `COORDINATES@SHA256`. The hash of a pinned jar may be
    omitted.

    Raises:
        UsageError: PySpark is not installed, or its version is not supported.
    """
    pins = {jar.coordinates: jar for jar in read_pins(_PINS)}
    if spark is None and (chosen := os.environ.get(KAFKA_JARS, "").strip()):
        named = [each.strip() for each in chosen.split(",")]
    else:
        spark = _installed_spark() if spark is None else spark
        line = ".".join(spark.split(".")[:2])
        if line not in _BESIDE_KAFKA:
            raise UsageError(
                f'jars for Kafka are not known for PySpark "{spark}"',
                detail=f"They are for {', '.join(_BESIDE_KAFKA)}.",
                hint=f"Install one of these, or name the jars in {KAFKA_JARS}, "
                "as group:name:version@SHA256 with commas between them.",
            )
        named = [
            f"org.apache.spark:spark-sql-kafka-0-10_2.13:{spark}",
            f"org.apache.spark:spark-token-provider-kafka-0-10_2.13:{spark}",
            *_BESIDE_KAFKA[line],
        ]
    return [_named(each, pins) for each in named]


def _named(text: str, pins: Mapping[str, Jar]) -> Jar:
    """Return the jar that `COORDINATES` or `COORDINATES@SHA256` names.

    Raises:
        UsageError: the hash is malformed, or is not the pinned one.
    """
    coordinates, at, sha256 = text.partition("@")
    pinned = pins.get(coordinates)
    if not at:
        return pinned or Jar.of(coordinates)
    if not _SHA256.fullmatch(sha256) or (pinned is not None and pinned.sha256 != sha256):
        raise UsageError(
            f'hash of jar "{coordinates}" is not its SHA-256',
            detail="A SHA-256 has 64 lower-case hexadecimal digits."
            if pinned is None
            else f"Its SHA-256 is {pinned.sha256}.",
            hint=f"Correct it in {KAFKA_JARS}. To compute it: sha256sum FILE",
        )
    return Jar.of(coordinates, sha256)


def _tried_instead() -> list[Jar]:
    """Return compatible jars of older versions, unless `PENSTOCK_KAFKA_JARS` is set."""
    if os.environ.get(KAFKA_JARS, "").strip():
        return []
    line = ".".join(_installed_spark().split(".")[:2])
    pins = {jar.coordinates: jar for jar in read_pins(_PINS)}
    named = (*_TRIED[line], *_BESIDE_KAFKA[line]) if line in _TRIED else ()
    return [pins.get(each) or Jar.of(each) for each in named]


def _here(jars: Iterable[Jar]) -> bool:
    """Return whether all of these jars are in the local folder."""
    return all(_fits(jars_folder() / jar.file, jar) for jar in jars)


def jars_for(jars: Iterable[Jar]) -> list[Path]:
    """Return the files of these jars; download the missing ones.

    Raises:
        UsageError: a jar is neither local nor available; the error names the files to add.
    """
    wanted = list(jars)
    for jar in wanted:
        if jar.sha256 is None:
            raise _unverified(jar)
    folder = jars_folder()
    maven = _Maven.settings()
    problems: dict[Jar, str] = {}
    for jar in wanted:
        if _fits(folder / jar.file, jar):
            continue
        try:
            _put(jar, folder, maven)
        except (OSError, HTTPException, ValueError) as error:
            problems[jar] = _reason(error)
            if not _answered(error):
                break  # No answer: each further jar would wait for the same timeout.
    if problems:
        raise _missing(wanted, folder, maven, problems)
    return [folder / jar.file for jar in wanted]


def unpacked(archive: Jar) -> Path:
    """Return the folder of an unpacked archive; download and unpack the archive if needed.

    Raises:
        UsageError: it is neither local nor available; the error names the file to add.
    """
    folder = jars_folder() / archive.stem
    half = folder.with_name(f".{archive.stem}")
    manifest = folder.with_name(f".{archive.stem}.{archive.sha256}.manifest")
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with folder.with_name(f".{archive.stem}.lock").open("w") as lock:
        # The kernel releases the lock of a killed process; the next process removes the partial
        # folder.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not _matches(folder, manifest):
            (file,) = jars_for([archive])
            for stale in (half, folder):
                shutil.rmtree(stale, ignore_errors=True)
            with tarfile.open(file) as packed:
                packed.extractall(half, filter="data")
            manifest.write_text(_hashes(half))
            half.rename(folder)
    return folder


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
            with path.open("rb") as content:
                digest = hashlib.file_digest(content, "sha256").hexdigest()
            lines.append(f"{digest} {path.relative_to(folder)}")
    return "\n".join(lines)


def public_repository() -> str:
    """Return the default repository of Spark's resolver, read from its Ivy jar.

    Raises:
        UsageError: PySpark is not installed, or has no such resolver.
    """
    found = find_spec("pyspark")
    for folder in (found and found.submodule_search_locations) or ():
        for ivy in Path(folder, "jars").glob("ivy-*.jar"):
            with zipfile.ZipFile(ivy) as classes:
                built_in = _BUILT_IN.search(classes.read(_RESOLVER))
            if built_in is not None:
                return built_in[0].decode().rstrip("/")
    raise UsageError(
        "no repository is known from which jars could be fetched",
        hint="Name one in DEFAULT_ARTIFACT_REPOSITORY, or install PySpark, which knows one.",
    )


_RESOLVER: Final = "org/apache/ivy/plugins/resolver/IBiblioResolver.class"
_BUILT_IN: Final = re.compile(rb"https://[a-z0-9./-]+/maven2/")


def jars_folder() -> Path:
    """Return the folder of jars: `PENSTOCK_JARS`, or a folder in the user's cache."""
    named = os.environ.get("PENSTOCK_JARS")
    return Path(named).absolute() if named else user_cache() / "penstock" / "jars"


def read_pins(file: Path) -> list[Jar]:
    """Return the jars that a file lists: one line per jar, with coordinates and SHA-256."""
    lines = [line.partition("#")[0].split() for line in file.read_text().splitlines()]
    return [Jar.of(*line) for line in lines if line]


_PINS: Final = Path(__file__).with_name("jars.txt")


def _installed_spark() -> str:
    try:
        return version("pyspark")
    except PackageNotFoundError as error:
        raise UsageError(
            "PySpark is not installed, so that no jars for Kafka can match it",
            hint=f"Install it, or name the jars in {KAFKA_JARS}.",
        ) from error


# Repositories.


@dataclass(frozen=True, slots=True)
class _Maven:
    """Locations of jars according to Maven's settings."""

    repository: str
    local: Path
    login: str | None = None
    """`user:password` for HTTP basic authentication."""

    @classmethod
    def settings(cls) -> "_Maven":
        home = Path.home() / ".m2"
        root = _read(home / "settings.xml")
        named = root.findtext("localRepository", "").strip()
        local = Path(_filled(named)).expanduser() if named else home / "repository"
        if chosen := os.environ.get("DEFAULT_ARTIFACT_REPOSITORY"):
            return cls(chosen.rstrip("/"), local)
        for mirror in root.iterfind("mirrors/mirror"):
            of = [each.strip() for each in mirror.findtext("mirrorOf", "").split(",")]
            if "!central" not in of and {"central", "*", "external:*"} & set(of):
                url = _filled(mirror.findtext("url", "")).strip().rstrip("/")
                return cls(url, local, _login(root, mirror.findtext("id", "").strip()))
        return cls(public_repository(), local)

    @property
    def shown(self) -> str:
        """Repository without its login."""
        return re.sub(r"//[^/]*@", "//", self.repository)

    def open(self, path: str) -> addinfourl:
        """Open a file of the repository."""
        parts = urlsplit(self.repository)
        login, url = self.login, f"{self.repository}/{path}"
        if parts.username is not None:
            # urllib treats a login in a URL as a part of the host name.
            login = f"{parts.username}:{parts.password or ''}"
            url = re.sub(r"//[^/]*@", "//", url)
        request = urllib.request.Request(url, headers={"User-Agent": "penstock"})
        if login is not None:
            # The header is not sent to the target of a redirect.
            code = base64.b64encode(login.encode()).decode()
            request.add_unredirected_header("Authorization", f"Basic {code}")
        answer: addinfourl = urllib.request.urlopen(request, timeout=PATIENCE_S)
        return answer


def _read(file: Path) -> ElementTree.Element:
    """Return Maven's settings without XML namespaces; an empty element if there are none."""
    try:
        root = ElementTree.fromstring(file.read_bytes())
    except OSError:
        return ElementTree.Element("settings")
    except ElementTree.ParseError as error:
        raise UsageError(
            f'settings of Maven "{file}" cannot be read',
            detail=f"{error}.",
            hint="Mend them, or name a repository in DEFAULT_ARTIFACT_REPOSITORY.",
        ) from error
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
    return root


def _login(root: ElementTree.Element, server_id: str) -> str | None:
    for server in root.iterfind("servers/server"):
        if server.findtext("id", "").strip() == server_id and server.find("username") is not None:
            user, password = server.findtext("username", ""), server.findtext("password", "")
            return f"{_filled(user).strip()}:{_filled(password).strip()}"
    return None


def _filled(text: str) -> str:
    """Replace the variables that Maven defines: the environment and the user's home folder."""
    text = text.replace("${user.home}", str(Path.home()))
    return re.sub(r"\$\{env\.(\w+)\}", lambda name: os.environ.get(name[1], ""), text)


# The local folder.


def _fits(file: Path, jar: Jar) -> bool:
    """Return whether a file has the hash of the jar."""
    try:
        with file.open("rb") as content:
            return hashlib.file_digest(content, "sha256").hexdigest() == jar.sha256
    except OSError:
        return False


def _put(jar: Jar, folder: Path, maven: _Maven) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    made, name = tempfile.mkstemp(prefix=f".{jar.name}-", dir=folder)
    candidate = Path(name)
    try:
        os.close(made)
        if _fits(here := maven.local / jar.path, jar):
            shutil.copyfile(here, candidate)
        else:
            _fetch(jar, candidate, maven)
        candidate.chmod(0o644)
        candidate.replace(folder / jar.file)
    finally:
        candidate.unlink(missing_ok=True)


def _fetch(jar: Jar, candidate: Path, maven: _Maven) -> None:
    log.info("fetching a jar", extra=fields(jar=jar.coordinates, repository=maven.shown))
    with maven.open(jar.path) as answer, candidate.open("wb") as file:
        shutil.copyfileobj(answer, file)
    if not _fits(candidate, jar):
        raise ValueError("what arrived is not this jar")


def _answered(error: Exception) -> bool:
    """Return whether a repository answered, but without the correct file."""
    return isinstance(error, urllib.error.HTTPError | ValueError)


def _reason(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        return "there is no such file" if error.code == 404 else f"it answers {error.code}"
    if isinstance(error, urllib.error.URLError) and isinstance(error.reason, OSError):
        return _reason(error.reason)
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__


def _unverified(jar: Jar) -> UsageError:
    return UsageError(
        f'jar "{jar.coordinates}" has no SHA-256 to verify it by',
        detail="It is not one of the jars whose hashes are known, and none was given.",
        hint=f"Name all jars in {KAFKA_JARS}, this one as {jar.coordinates}@SHA256. "
        "To compute it from a file that you trust: sha256sum FILE",
    )


def _missing(
    wanted: Iterable[Jar], folder: Path, maven: _Maven, problems: Mapping[Jar, str]
) -> UsageError:
    absent = [jar for jar in wanted if not _fits(folder / jar.file, jar)]
    first, reason = next(iter(problems.items()))
    wrong = [jar.file for jar in absent if (folder / jar.file).exists()]
    return UsageError(
        f'jar "{first.coordinates}" is not here and could not be fetched',
        detail=f'From repository "{maven.shown}": {reason}.'
        + (f" There already, but not what it should be: {', '.join(wrong)}." if wrong else ""),
        hint=f'Put into folder "{folder}" these files, which a Maven repository has under these '
        f"paths, or name another folder in PENSTOCK_JARS, or a repository in "
        f"DEFAULT_ARTIFACT_REPOSITORY: {', '.join(jar.path for jar in absent)}",
    )
