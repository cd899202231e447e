"""Real Kafka broker in a temporary folder, for fault tests.

    with KafkaBroker() as kafka:
        kafka.create_topic("orders", partitions=4)
        producer = Producer(kafka.client())
        …
        kafka.kill()       # as a power cut of the process, not of the disk
        kafka.start()      # on the same port, with the same data

The broker is Apache Kafka, run from its jars, which are downloaded once; see `engine/jars.py`. Each
node is broker and controller in one. It listens on 127.0.0.1 only and creates no topic by itself.
Its settings make timeouts, retention and compaction take effect within about a second.

Run as a program, it is an interactive broker: `python -m penstock.testing.kafka`, or `make kafka`.
"""

import base64
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, Self, TypeVar

from confluent_kafka import KafkaError, KafkaException, TopicCollection, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec  # type: ignore[attr-defined]
from confluent_kafka.admin._topic import TopicDescription
from confluent_kafka.cimpl import NewPartitions, NewTopic

from penstock.clock import SYSTEM_CLOCK
from penstock.demo.process import (
    ServerProcess,
    await_claim,
    free_port,
    free_ports,
    until_we_end,
)
from penstock.engine.jars import jars_for, read_pins
from penstock.engine.java import find_java
from penstock.errors import UsageError

__all__ = ["JAVA_OPTIONS", "KafkaBroker", "Protocol", "Tls"]

HOST: Final = "127.0.0.1"
USUAL_PORT: Final = 9092
ANSWER_S: Final = 20.0
"""Timeout of one request to the broker, in seconds."""

Protocol = Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"]

SETTINGS: Final[Mapping[str, object]] = {
    "auto.create.topics.enable": "false",
    "group.initial.rebalance.delay.ms": 0,
    "offsets.topic.num.partitions": 1,
    "transaction.state.log.num.partitions": 1,
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": 200,
    # Retention and compaction, short enough for a test to wait for them.
    "log.initial.task.delay.ms": 200,
    "log.retention.check.interval.ms": 300,
    "log.segment.delete.delay.ms": 200,
    "log.cleaner.backoff.ms": 200,
    "log.cleaner.min.cleanable.ratio": 0.01,
    "log.cleaner.dedupe.buffer.size": 4 << 20,
    # A dead node is detected soon.
    "broker.heartbeat.interval.ms": 300,
    "broker.session.timeout.ms": 2_000,
    # Low resource use.
    "num.network.threads": 2,
    "num.io.threads": 4,
    "background.threads": 2,
    "num.recovery.threads.per.data.dir": 1,
}

JAVA_OPTIONS: Final = (
    *("-Xmx256m", "-Xms64m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"),
    *("-Djava.awt.headless=true", "-Dfile.encoding=UTF-8"),
)
"""Options for a small heap and a fast start instead of fast code."""

_LOGGING: Final = """\
status = error
appender.out.type = Console
appender.out.name = out
appender.out.layout.type = PatternLayout
appender.out.layout.pattern = %d %p %c{1} %m%n%throwable
rootLogger.level = warn
rootLogger.appenderRef.out.ref = out
logger.server.name = kafka.server.KafkaRaftServer
logger.server.level = info
"""

_Result = TypeVar("_Result")

_UNTYPED: Final[Any] = OffsetSpec
_LATEST: Final = _UNTYPED.latest()


@dataclass(frozen=True, slots=True)
class Tls:
    """TLS files of a broker, all in PEM format."""

    certificate: Path
    """Certificate for `localhost`."""

    key: Path
    """Private key in PKCS #8 form, without a password."""

    authority: Path
    """CA of the client certificates."""

    clients: Literal["none", "requested", "required"] = "none"
    """Requirement of client certificates."""


@dataclass(slots=True)
class _Node:
    number: int
    folder: Path
    ports: dict[str, int]
    """Ports by listener."""

    identity: str
    process: ServerProcess


class KafkaBroker:
    """Broker, or small cluster, that can be killed and restarted on the same ports.

    Nodes are numbered from 1.
    """

    def __init__(
        self,
        *,
        nodes: int = 1,
        settings: Mapping[str, object] | None = None,
        tls: Tls | None = None,
        users: Mapping[str, str] | None = None,
        port: int | None = None,
        folder: Path | None = None,
    ) -> None:
        """Prepare a cluster; `settings` are added to its configuration.

        With `tls` it also listens for `SSL`; with `users` and their passwords for `SASL_PLAINTEXT`,
        by PLAIN and SCRAM; with both for `SASL_SSL`. `port` is the PLAINTEXT port of the first
        node; the default is a free port. The data is in `folder`, which is created and stays, or
        else in a temporary folder.

        Raises:
            UsageError: there is no Java, or the jars are not available.
        """
        self._java = find_java()
        self._classes = os.pathsep.join(map(str, jars_for(read_pins(_PINS))))
        self._tls = tls
        self._users = dict(users or {})
        self._cluster = _identity()
        self._stays = folder is not None
        self.folder = folder or Path(tempfile.mkdtemp(prefix="penstock-kafka-"))
        self.folder.mkdir(mode=0o700, exist_ok=True)
        self._nodes = [self._node(number) for number in range(1, nodes + 1)]
        if port is not None:
            self._nodes[0].ports["PLAINTEXT"] = port
        self.settings = {**SETTINGS, **_replicated(nodes), **(settings or {})}
        self._admin: AdminClient | None = None

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def bootstrap(self) -> str:
        """Bootstrap servers, without TLS or a password."""
        return self.bootstrap_for("PLAINTEXT")

    def bootstrap_for(self, protocol: Protocol) -> str:
        """Return the bootstrap servers of a protocol."""
        return ",".join(f"{_called(protocol)}:{node.ports[protocol]}" for node in self._nodes)

    def client(self, **settings: object) -> dict[str, Any]:
        """Return the configuration of a confluent-kafka client; `__` in a name means a dot."""
        given = {name.replace("__", "."): value for name, value in settings.items()}
        # The client would log the end of a killed broker to standard error.
        return {"bootstrap.servers": self.bootstrap, "log_level": 0, **given}

    @property
    def pids(self) -> dict[int, int]:
        """Process ids of the running nodes, by node."""
        found = {node.number: node.process.pid for node in self._nodes}
        return {number: pid for number, pid in found.items() if pid is not None}

    # Lifecycle.

    def start(self, node: int | None = None) -> None:
        """Start the nodes that do not run, or only this one, and wait until they answer."""
        self.launch(node)
        self._await_answer()

    def launch(self, node: int | None = None) -> None:
        """Start the nodes as `start` does, without waiting; `start` can wait for them later."""
        chosen = [each for each in self._chosen(node) if not each.process.running]
        for each in chosen:
            if not (each.folder / "data").exists():
                self._format(each)
            self._launch(each)

    def stop(self, node: int | None = None) -> None:
        """Stop nodes with SIGTERM."""
        self._end(node, signal.SIGTERM)

    def kill(self, node: int | None = None) -> None:
        """End nodes with SIGKILL. Acknowledged records are in their data folders."""
        self._end(node, signal.SIGKILL)

    @contextmanager
    def hung(self) -> Iterator[None]:
        """Stop all nodes with SIGSTOP; continue them at the end of the block.

        The kernel still accepts connections and acknowledges bytes.
        """
        pids = self.pids.values()
        try:
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            yield
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)

    def restart(self, node: int | None = None) -> None:
        """Stop nodes and start them on the same ports."""
        self.stop(node)
        self.start(node)

    def close(self) -> None:
        """End all nodes, and remove a temporary folder. Safe to call twice."""
        self._admin = None
        self.kill()
        if not self._stays:
            shutil.rmtree(self.folder, ignore_errors=True)

    def log_tail(self, lines: int = 30) -> str:
        """Return the end of the output of each node."""
        said = [(node.number, node.process.log_tail(lines)) for node in self._nodes]
        return "\n".join(f"node {number}:\n{tail}" for number, tail in said if tail)

    # Topics.

    @property
    def admin(self) -> AdminClient:
        """Admin client."""
        if self._admin is None:
            self._admin = AdminClient(self.client())
        return self._admin

    def create_topic(
        self,
        name: str,
        *,
        partitions: int = 1,
        replicas: int | None = None,
        settings: Mapping[str, object] | None = None,
    ) -> None:
        """Create a topic, and wait until it is usable."""
        topic = NewTopic(
            name,
            num_partitions=partitions,
            replication_factor=len(self._nodes) if replicas is None else replicas,
            config={key: str(value) for key, value in (settings or {}).items()},
        )
        _answer(self.admin.create_topics([topic], operation_timeout=ANSWER_S)[name])
        await_claim(
            lambda: self._led(name, partitions), f'all partitions of topic "{name}" to have leaders'
        )

    def delete_topic(self, name: str) -> None:
        """Delete a topic with its records."""
        _answer(self.admin.delete_topics([name], operation_timeout=ANSWER_S)[name])
        await_claim(lambda: name not in self.topics(), f'topic "{name}" to be gone')

    def add_partitions(self, name: str, total: int) -> None:
        """Increase the number of partitions to `total`."""
        wanted = [NewPartitions(name, total)]
        _answer(self.admin.create_partitions(wanted, operation_timeout=ANSWER_S)[name])
        await_claim(lambda: self._led(name, total), f'topic "{name}" to have {total} partitions')

    def describe_topic(self, name: str) -> TopicDescription:
        """Return the current description of a topic, including its id."""
        found: list[TopicDescription] = []

        def told() -> bool:
            # The client sends the request to the last known controller. If that node was killed,
            # the client repeats the request until it learns of another controller. A listing of
            # topics updates its metadata.
            self.topics()
            asked = self.admin.describe_topics(TopicCollection([name]), request_timeout=2.0)
            try:
                found.append(_answer(asked[name]))
            except KafkaException as error:
                if error.args[0].code() != KafkaError._TIMED_OUT:
                    raise
            return bool(found)

        await_claim(told, f'kafka to describe topic "{name}"')
        return found[0]

    def topics(self) -> set[str]:
        """Return the names of all topics."""
        return set(self.admin.list_topics(timeout=ANSWER_S).topics)

    def _led(self, name: str, partitions: int) -> bool:
        try:
            found = self.describe_topic(name).partitions
            if len(found) != partitions or any(each.leader is None for each in found):
                return False
            # The leader of a partition may not know of it yet.
            latest = {TopicPartition(name, each.id): _LATEST for each in found}
            asked = self.admin.list_offsets(latest, request_timeout=ANSWER_S)
            return all(_answer(each).offset >= 0 for each in asked.values())
        except KafkaException:
            return False  # The metadata reaches each node at a different time.

    # Configuration and processes.

    def _node(self, number: int) -> _Node:
        names = ["PLAINTEXT", "CONTROLLER"]
        names += ["SSL"] if self._tls else []
        names += ["SASL_PLAINTEXT"] if self._users else []
        names += ["SASL_SSL"] if self._tls and self._users else []
        folder = self.folder / f"node{number}"
        folder.mkdir()
        ports = dict(zip(names, free_ports(len(names)), strict=True))
        return _Node(number, folder, ports, _identity(), ServerProcess(folder))

    def _chosen(self, node: int | None) -> list[_Node]:
        return self._nodes if node is None else [self._nodes[node - 1]]

    def _format(self, node: _Node) -> None:
        file = node.folder / "server.properties"
        file.write_text("".join(f"{k}={v}\n" for k, v in self._properties(node).items()))
        (node.folder / "log4j2.properties").write_text(_LOGGING)
        command = ["kafka.tools.StorageTool", "format", "-t", self._cluster, "-c", str(file)]
        if len(self._nodes) == 1:
            command.append("--standalone")
        else:
            voters = [
                f"{each.number}@{HOST}:{each.ports['CONTROLLER']}:{each.identity}"
                for each in self._nodes
            ]
            command += ["--initial-controllers", ",".join(voters)]
        for user, password in self._users.items():
            for mechanism in ("SCRAM-SHA-256", "SCRAM-SHA-512"):
                command += ["-S", f"{mechanism}=[name={user},password={password}]"]
        done = subprocess.run(
            self._java_command(node, *command),
            cwd=node.folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            shutil.rmtree(node.folder / "data", ignore_errors=True)
            raise UsageError(
                f"storage of kafka node {node.number} could not be made",
                detail=f"{done.stdout}{done.stderr}",
            )

    def _properties(self, node: _Node) -> dict[str, object]:
        listeners = ",".join(f"{name}://{HOST}:{port}" for name, port in node.ports.items())
        advertised = ",".join(
            f"{name}://{_called(name)}:{port}"
            for name, port in node.ports.items()
            if name != "CONTROLLER"
        )
        kinds = {name: name for name in node.ports} | {"CONTROLLER": "PLAINTEXT"}
        found: dict[str, object] = {
            "process.roles": "broker,controller",
            "node.id": node.number,
            "controller.listener.names": "CONTROLLER",
            "controller.quorum.bootstrap.servers": ",".join(
                f"{HOST}:{each.ports['CONTROLLER']}" for each in self._nodes
            ),
            "listeners": listeners,
            "advertised.listeners": advertised,
            "listener.security.protocol.map": ",".join(f"{k}:{v}" for k, v in kinds.items()),
            "inter.broker.listener.name": "PLAINTEXT",
            "log.dirs": node.folder / "data",
        }
        if self._tls is not None:
            found |= self._tls_properties(node, self._tls)
        if self._users:
            found |= self._sasl_properties(node)
        return found | self.settings

    def _tls_properties(self, node: _Node, tls: Tls) -> dict[str, object]:
        both = node.folder / "server.pem"
        both.touch(mode=0o600)
        both.write_bytes(tls.key.read_bytes() + tls.certificate.read_bytes())
        return {
            "ssl.keystore.type": "PEM",
            "ssl.keystore.location": both,
            "ssl.truststore.type": "PEM",
            "ssl.truststore.location": tls.authority,
            "ssl.client.auth": tls.clients,
        }

    def _sasl_properties(self, node: _Node) -> dict[str, object]:
        package = "org.apache.kafka.common.security"
        known = " ".join(f'user_{user}="{word}"' for user, word in self._users.items())
        found: dict[str, object] = {}
        for name in node.ports:
            if name.startswith("SASL_"):
                prefix = f"listener.name.{name.lower()}"
                found[f"{prefix}.sasl.enabled.mechanisms"] = "PLAIN,SCRAM-SHA-256,SCRAM-SHA-512"
                found[f"{prefix}.plain.sasl.jaas.config"] = (
                    f"{package}.plain.PlainLoginModule required {known};"
                )
                for scram in ("scram-sha-256", "scram-sha-512"):
                    found[f"{prefix}.{scram}.sasl.jaas.config"] = (
                        f"{package}.scram.ScramLoginModule required;"
                    )
        return found

    def _java_command(self, node: _Node, *arguments: str) -> list[str]:
        logging = (node.folder / "log4j2.properties").as_uri()
        return [
            *(str(self._java.program), *JAVA_OPTIONS, f"-Dlog4j2.configurationFile={logging}"),
            *("-cp", self._classes, *arguments),
        ]

    def _launch(self, node: _Node) -> None:
        properties = str(node.folder / "server.properties")
        command = self._java_command(node, "kafka.Kafka", properties)
        node.process.start(until_we_end(command, "KILL"))

    def _await_answer(self) -> None:
        """Wait until every running node is in the cluster metadata."""
        for node in self._nodes:
            if node.process.running:
                self._await(lambda node=node: _listens(node.ports["PLAINTEXT"]), "to listen")  # type: ignore[misc]
        running = {node.number for node in self._nodes if node.process.running}
        # Without a majority there is no controller that could answer.
        if len(running) * 2 > len(self._nodes):
            self._await(lambda: running <= self._known(), "to answer")

    def _known(self) -> set[int]:
        try:
            found = _answer(self.admin.describe_cluster(request_timeout=2.0))
        except KafkaException:
            return set()
        return {each.id for each in found.nodes}

    def _await(self, claim: Callable[[], bool], what: str) -> None:
        def alive() -> bool:
            for node in self._nodes:
                if node.process.status not in (None, *_ENDED_BY_US):
                    raise UsageError(
                        f"kafka node {node.number} did not start", detail=self.log_tail()
                    )
            return claim()

        await_claim(alive, f"kafka {what}", said=self.log_tail)

    def _end(self, node: int | None, how: signal.Signals) -> None:
        chosen = [each.process for each in self._chosen(node) if each.process.running]
        for process in chosen:
            process.signal(how)
        for process in chosen:
            process.wait_or_kill()


_PINS: Final = Path(__file__).with_name("kafka.txt")

_ENDED_BY_US: Final = (-signal.SIGKILL, -signal.SIGTERM, 128 + signal.SIGTERM, 0)


def _replicated(nodes: int) -> dict[str, object]:
    enough = 2 if nodes > 2 else 1
    return {
        "default.replication.factor": nodes,
        "min.insync.replicas": enough,
        "offsets.topic.replication.factor": nodes,
        "transaction.state.log.replication.factor": nodes,
        "transaction.state.log.min.isr": enough,
        "share.coordinator.state.topic.replication.factor": nodes,
        "share.coordinator.state.topic.min.isr": enough,
    }


def _called(protocol: str) -> str:
    """Return the host name that matches the certificate of a listener."""
    return "localhost" if protocol.endswith("SSL") else HOST


def _identity() -> str:
    """Return a random UUID in the form of Kafka."""
    return base64.urlsafe_b64encode(b"\0" + os.urandom(15)).decode().rstrip("=")


def _listens(port: int) -> bool:
    with socket.socket() as line:
        line.settimeout(1)
        return line.connect_ex((HOST, port)) == 0


def _answer(asked: "Future[_Result]") -> _Result:
    return asked.result(ANSWER_S + 5)


# Command line.


def main() -> int:
    """Run a broker until Ctrl-C, on its usual port if that is free."""
    port = free_port() if _listens(USUAL_PORT) else USUAL_PORT
    print("starting Apache Kafka; the first time its jars are fetched, 44 MB", flush=True)
    try:
        broker = KafkaBroker(port=port, settings={"auto.create.topics.enable": "true"})
    except UsageError as error:
        print("\n".join([str(error), *getattr(error, "__notes__", [])]), file=sys.stderr)
        return 1
    ended = threading.Event()
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, lambda *_: ended.set())
    with broker:
        print(_WELCOME.format(bootstrap=broker.bootstrap, folder=broker.folder), flush=True)
        if port != USUAL_PORT:
            print(f"Port {USUAL_PORT} is taken by someone else, so it is {port}.", flush=True)
        while not ended.is_set() and broker.pids:
            SYSTEM_CLOCK.wait(ended, 1_000)
        if not ended.is_set():
            print(f"the broker ended:\n{broker.log_tail()}", file=sys.stderr)
            return 1
    return 0


_WELCOME: Final = """
Kafka is at {bootstrap}, without TLS or passwords. It makes a topic when one is first written to.
Its records are in {folder}, and go when it ends: Ctrl-C.

With kcat (`apt-get install kcat`):
    echo '1:{{"id": 1}}' | kcat -b {bootstrap} -P -t orders -K:
    kcat -b {bootstrap} -C -t orders -e -f '%p %o %k %s\\n'

With Python:
    from confluent_kafka import Producer
    producer = Producer({{"bootstrap.servers": "{bootstrap}"}})
    producer.produce("orders", key="1", value='{{"id": 1}}')
    producer.flush()
"""

if __name__ == "__main__":
    sys.exit(main())
