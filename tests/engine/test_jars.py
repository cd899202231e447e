"""Jars from a repository on loopback, resolved by Spark's resolver and by Maven."""

import base64
import hashlib
import io
import os
import threading
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import distribution, version
from pathlib import Path

import pytest

from penstock.engine import jars as the_jars
from penstock.engine.jars import Jar, jars_folder, jars_for, kafka_list, read_pins
from penstock.errors import UsageError
from penstock.servers import kafka

SPARK = "org.apache.spark:spark-sql-kafka-0-10_2.13"


@dataclass
class Repository:
    """Repository with files by path, and the requested paths."""

    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    requested: list[str] = field(default_factory=list)
    login: str | None = None
    """Required Authorization header."""

    def put(self, coordinates: str) -> Jar:
        """Add a jar with its checksum."""
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w") as archive:
            archive.writestr("name", coordinates * 1_000)
        return self._add(coordinates, packed.getvalue())

    def _add(self, coordinates: str, content: bytes) -> Jar:
        jar = Jar.of(coordinates, hashlib.sha256(content).hexdigest())
        self.files[jar.path] = content
        self.files[f"{jar.path}.sha1"] = hashlib.sha1(content).hexdigest().encode()
        return jar


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Repository]:
    """Yield a repository, with an empty home and an empty folder of jars."""
    repository = Repository()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.lstrip("/")
            repository.requested.append(path)
            if (
                repository.login is not None
                and self.headers.get("Authorization") != repository.login
            ):
                self.send_response(401)
                self.send_header("WWW-Authenticate", 'Basic realm="house"')
                self.end_headers()
            elif path in repository.files:
                self.send_response(200)
                self.send_header("Content-Length", str(len(repository.files[path])))
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(repository.files[path])
            else:
                self.send_error(404)

        def do_HEAD(self) -> None:
            self.do_GET()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    repository.url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setenv("DEFAULT_ARTIFACT_REPOSITORY", repository.url)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PENSTOCK_JARS", str(tmp_path / "jars"))
    monkeypatch.delenv(the_jars.KAFKA_JARS, raising=False)
    try:
        yield repository
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_jar_is_fetched_once(repository: Repository) -> None:
    jar = repository.put("org.example:one:1.0")
    (file,) = jars_for([jar])
    assert file == jars_folder() / "one-1.0.jar"
    assert file.read_bytes() == repository.files[jar.path]
    assert set(repository.requested) == {"org/example/one/1.0/one-1.0.jar"}
    repository.requested.clear()
    assert jars_for([jar]) == [file]
    assert repository.requested == []


def test_jar_with_wrong_hash_is_not_stored(repository: Repository) -> None:
    jar = repository.put("org.example:one:1.0")
    repository.files[jar.path] += b"more"
    with pytest.raises(UsageError, match="could not resolve") as refused:
        jars_for([jar])
    assert "one-1.0.jar does not have the pinned SHA-256" in refused.value.detail
    assert [file.name for file in jars_folder().iterdir()] == [".lock"]


@pytest.mark.parametrize("sha256", ["", "@12"])
def test_jar_without_a_hash_is_rejected_and_not_fetched(
    repository: Repository, monkeypatch: pytest.MonkeyPatch, sha256: str
) -> None:
    repository.put("org.example:one:1.0")
    monkeypatch.setenv(the_jars.KAFKA_JARS, f"org.example:one:1.0{sha256}")
    with pytest.raises(UsageError, match="has no SHA-256 to verify it by") as refused:
        the_jars.kafka_jars()
    assert "org.example:one:1.0@SHA256" in refused.value.hint
    assert repository.requested == []


def test_jar_in_the_folder_is_verified_by_the_hash_that_was_given(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    jar = repository.put("org.example:one:1.0")
    monkeypatch.setenv(the_jars.KAFKA_JARS, f"org.example:one:1.0@{jar.sha256}")
    jars_folder().mkdir()
    (jars_folder() / jar.file).write_bytes(b"another")
    (file,) = the_jars.kafka_jars()
    assert file.read_bytes() == repository.files[jar.path]


def test_damaged_jar_is_fetched_again(repository: Repository) -> None:
    jar = repository.put("org.example:one:1.0")
    (file,) = jars_for([jar])
    file.write_bytes(b"half of i")
    assert jars_for([jar])[0].read_bytes() == repository.files[jar.path]


def test_concurrent_fetches_store_complete_jars_only(repository: Repository) -> None:
    listed = [repository.put(f"org.example:jar{number}:1.0") for number in range(3)]
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda _: jars_for(listed), range(8)))
    assert results == [[jars_folder() / jar.file for jar in listed]] * 8
    for jar in listed:
        assert (jars_folder() / jar.file).read_bytes() == repository.files[jar.path]
    assert len(list(jars_folder().iterdir())) == 4  # With the lock.


def test_unreachable_repository_error_lists_files_and_folder_without_secrets(
    repository: Repository, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stored, wrong = repository.put("org.example:stored:1.0"), repository.put("org.example:wrong:1")
    absent = [Jar.of("org.example:one:1.0", "0" * 64), Jar.of("org.example.deep:two:2.0", "1" * 64)]
    jars_for([stored])
    (jars_folder() / wrong.file).write_bytes(b"no jar")
    url = "http://user:secret@127.0.0.1:1/maven?token=secret"
    monkeypatch.setenv("DEFAULT_ARTIFACT_REPOSITORY", url)
    with pytest.raises(UsageError) as refused:
        jars_for([stored, wrong, *absent])
    error = refused.value
    assert str(error) == 'could not resolve jar "org.example:wrong:1"'
    assert error.detail.startswith("Spark's resolver reported: ")
    assert "127.0.0.1:1 (java.net.ConnectException: Connection refused)" in error.detail
    assert error.detail.endswith("Files with another hash in the folder: wrong-1.jar.")
    assert f'into folder "{jars_folder()}"' in error.hint
    assert error.hint.endswith(
        ": org/example/wrong/1/wrong-1.jar, org/example/one/1.0/one-1.0.jar,"
        " org/example/deep/two/2.0/two-2.0.jar"
    )
    assert "secret" not in f"{error} {error.detail} {error.hint} {caplog.text}"


def test_file_in_the_folder_is_used(repository: Repository) -> None:
    jar = repository.put("org.example:one:1.0")
    jars_folder().mkdir()
    (jars_folder() / "one-1.0.jar").write_bytes(repository.files[jar.path])
    jars_for([jar])
    assert repository.requested == []


def test_missing_jar_does_not_stop_fetches_of_others(repository: Repository) -> None:
    other = repository.put("org.example:other:1.0")
    with pytest.raises(UsageError) as refused:
        jars_for([Jar.of("org.example:one:1.0", "0" * 64), other])
    assert "org.example#one;1.0: not found" in refused.value.detail
    assert refused.value.hint.endswith(": org/example/one/1.0/one-1.0.jar")


def test_jar_in_local_maven_repository_is_used(repository: Repository) -> None:
    jar = repository.put("org.example:one:1.0")
    own = Path.home() / ".m2" / "repository" / jar.path
    own.parent.mkdir(parents=True)
    own.write_bytes(repository.files[jar.path])
    assert jars_for([jar])[0].read_bytes() == own.read_bytes()
    assert repository.requested == []


def test_ivy_settings_of_spark_are_used_with_their_login(
    repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jar = repository.put("org.example:one:1.0")
    monkeypatch.setenv("DEFAULT_ARTIFACT_REPOSITORY", "http://127.0.0.1:1")
    repository.login = f"Basic {base64.b64encode(b'me:of mouth').decode()}"
    settings = tmp_path / "ivysettings.xml"
    settings.write_text(f"""
        <ivysettings>
          <settings defaultResolver="house"/>
          <credentials host="127.0.0.1" realm="house" username="me" passwd="of mouth"/>
          <resolvers>
            <ibiblio name="house" m2compatible="true" root="{repository.url}/"/>
          </resolvers>
        </ivysettings>""")
    (tmp_path / "spark-defaults.conf").write_text(f"spark.jars.ivySettings  {settings}\n")
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path))
    assert jars_for([jar])[0].read_bytes() == repository.files[jar.path]


MAVEN = """\
#!/bin/sh
# Stands for Maven: copies the jars of a POM to the output folder, or fails as Maven does.
for argument do
    case $argument in
        --file=*) pom=${argument#--file=} ;;
        -DoutputDirectory=*) out=${argument#-DoutputDirectory=} ;;
    esac
done
cp "$pom" "$0.pom"
if [ -e "$0.jar" ]; then
    mkdir "$out" && cp "$0.jar" "$out/one-1.0.jar"
else
    echo "[ERROR] Failed: Could not transfer artifact org.example:one:jar:1.0 from/to house" \
        "(https://me:secret@house.example/maven?key=secret): status 401 -> [Help 1]"
    exit 1
fi
"""


@pytest.fixture
def mvn(repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a program that stands for Maven on the PATH."""
    mvn = tmp_path / "bin" / "mvn"
    mvn.parent.mkdir()
    mvn.write_text(MAVEN)
    mvn.chmod(0o755)
    monkeypatch.delenv("DEFAULT_ARTIFACT_REPOSITORY")
    monkeypatch.setenv("PATH", f"{mvn.parent}{os.pathsep}{os.environ['PATH']}")
    return mvn


def test_installed_maven_resolves_jars_without_their_dependencies(
    repository: Repository, mvn: Path
) -> None:
    jar = repository.put("org.example:one:1.0")
    mvn.with_name("mvn.jar").write_bytes(repository.files[jar.path])
    assert jars_for([jar])[0].read_bytes() == repository.files[jar.path]
    assert repository.requested == []
    pom = mvn.with_name("mvn.pom").read_text()
    assert "<groupId>org.example</groupId><artifactId>one</artifactId>" in pom
    assert "<dependency>" not in pom


def test_jar_from_maven_with_wrong_hash_is_not_stored(repository: Repository, mvn: Path) -> None:
    jar = repository.put("org.example:one:1.0")
    mvn.with_name("mvn.jar").write_bytes(b"another")
    with pytest.raises(UsageError, match="could not resolve") as refused:
        jars_for([jar])
    assert "Maven reported: file one-1.0.jar does not have the pinned SHA" in refused.value.detail
    assert not (jars_folder() / jar.file).exists()


def test_failure_of_maven_is_reported_without_secrets(repository: Repository, mvn: Path) -> None:
    with pytest.raises(UsageError) as refused:
        jars_for([repository.put("org.example:one:1.0")])
    assert refused.value.detail == (
        "Maven reported: Could not transfer artifact org.example:one:jar:1.0 from/to house "
        "(house.example): status 401."
    )


def test_archive_with_classifier_is_resolved(repository: Repository) -> None:
    archive = repository.put("org.example:app:1.0:tar.gz:all")
    assert archive.path == "org/example/app/1.0/app-1.0-all.tar.gz"
    assert archive.coordinates == "org.example:app:1.0:tar.gz:all"
    (file,) = jars_for([archive])
    assert file.read_bytes() == repository.files[archive.path]


def test_jars_of_installed_spark_are_listed_and_not_shipped_by_it() -> None:
    listed = kafka_list(version("pyspark"))
    shipped = Path(str(distribution("pyspark").locate_file("pyspark/jars")))
    assert (shipped / f"spark-core_2.13-{version('pyspark')}.jar").exists()
    for jar in listed:
        assert list(shipped.glob(f"{jar.name}-[0-9]*.jar")) == []


@pytest.mark.parametrize("spark", ["4.1.0", "4.1.3", "4.2.0", "4.3.0", "4.3.1"])
def test_supported_spark_version_has_one_jar_of_each_name(spark: str) -> None:
    assert sorted(jar.name for jar in kafka_list(spark)) == [
        "commons-pool2",
        "kafka-clients",
        "spark-sql-kafka-0-10_2.13",
        "spark-token-provider-kafka-0-10_2.13",
    ]


def test_kafka_jars_variable_selects_other_jars(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pinned jar needs no hash."""
    other = repository.put("org.apache.kafka:kafka-clients:4.0.0")
    pinned = f"{SPARK}:4.2.0"
    monkeypatch.setenv(the_jars.KAFKA_JARS, f"{pinned}, {other.coordinates}@{other.sha256}")
    with pytest.raises(UsageError, match=f'could not resolve jar "{pinned}"') as refused:
        the_jars.kafka_jars()
    assert (jars_folder() / other.file).exists()
    assert "kafka-clients" not in refused.value.hint


@pytest.mark.parametrize("wrong", ["", "one", "a:b", "a:b:c:d", "../a:b:1", "a:b:1:tar.gz:../c"])
def test_malformed_coordinates_are_rejected(wrong: str) -> None:
    with pytest.raises(UsageError, match="of a jar are invalid"):
        Jar.of(wrong, "0" * 64)


def test_unknown_spark_version_is_rejected() -> None:
    with pytest.raises(UsageError, match=r'no Kafka jars are listed for PySpark "9\.9\.9"'):
        kafka_list("9.9.9")


def test_broker_jar_list_has_unique_pinned_jars() -> None:
    listed = read_pins(kafka._PINS)
    assert len({jar.name for jar in listed}) == len(listed)
    assert "kafka_2.13" in {jar.name for jar in listed}
