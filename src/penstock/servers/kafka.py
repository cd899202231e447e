"""Kafka broker in a folder of its own, which can be stopped, killed and restarted.

    with KafkaBroker() as kafka:
        kafka.create_topic("orders", partitions=4)
        producer = Producer(kafka.client())
        …
        kafka.kill()       # as a power cut of the process, not of the disk
        kafka.start()      # on the same port, with the same data

The broker is Apache Kafka, run from its jars, which are downloaded once; see `engine/jars.py`. Each
node is broker and controller in one. It listens on 127.0.0.1 only and creates no topic by itself.
Its settings make timeouts, retention and compaction take effect within about a second.

Run as a program, it is an interactive broker: `python -m penstock.servers.kafka`, or `make kafka`.
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
from typing import Any, Final, Literal, TypeVar

from confluent_kafka import KafkaError, KafkaException, TopicCollection, TopicPartition
from confluent_kafka.admin import (
    AdminClient,
    OffsetSpec,  # pyright: ignore[reportPrivateImportUsage]
)
from confluent_kafka.admin._topic import TopicDescription
from confluent_kafka.cimpl import NewPartitions, NewTopic

from penstock.clock import SYSTEM_CLOCK
from penstock.engine import find_java, jars_for, read_pins
from penstock.errors import UsageError
from penstock.servers.process import (
    LocalServer,
    ServerProcess,
    end_with_parent,
    free_port,
    free_ports,
    wait_until,
)

__all__ = ["JAVA_OPTIONS", "KafkaBroker", "Protocol", "Tls"]

HOST: Final = "127.0.0.1"
DEFAULT_PORT: Final = 9092
REQUEST_TIMEOUT_S: Final = 20.0
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

    directory_id: str
    process: ServerProcess


class KafkaBroker(LocalServer):
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
        self._cluster_id = _random_uuid()
        self._is_temporary = folder is None
        self.folder = folder or Path(tempfile.mkdtemp(prefix="penstock-kafka-"))
        self.folder.mkdir(mode=0o700, exist_ok=True)
        self._nodes = [self._node(number) for number in range(1, nodes + 1)]
        if port is not None:
            self._nodes[0].ports["PLAINTEXT"] = port
        self.settings = {**SETTINGS, **_replicated(nodes), **(settings or {})}
        self._admin: AdminClient | None = None

    @property
    def bootstrap(self) -> str:
        """Bootstrap servers, without TLS or a password."""
        return self.bootstrap_for("PLAINTEXT")

    def bootstrap_for(self, protocol: Protocol) -> str:
        """Return the bootstrap servers of a protocol."""
        return ",".join(f"{_host_name(protocol)}:{node.ports[protocol]}" for node in self._nodes)

    def client(self, **settings: object) -> dict[str, Any]:
        """Return the configuration of a confluent-kafka client; `__` in a name means a dot."""
        given = {name.replace("__", "."): value for name, value in settings.items()}
        # The client would log the end of a killed broker to standard error.
        return {"bootstrap.servers": self.bootstrap, "log_level": 0, **given}

    @property
    def pids(self) -> dict[int, int]:
        """Process ids of the running nodes, by node."""
        pids = {node.number: node.process.pid for node in self._nodes}
        return {number: pid for number, pid in pids.items() if pid is not None}

    # Lifecycle.

    def start(self, node: int | None = None) -> None:
        """Start the nodes that do not run, or only this node, and wait until they answer."""
        self.launch(node)
        self._await_answer()

    def launch(self, node: int | None = None) -> None:
        """Start the nodes as `start` does, without waiting; `start` can wait for them later."""
        stopped = [one for one in self._select(node) if not one.process.running]
        for stopped_node in stopped:
            if not (stopped_node.folder / "data").exists():
                self._format(stopped_node)
            self._launch(stopped_node)

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
        if self._is_temporary:
            shutil.rmtree(self.folder, ignore_errors=True)

    def log_tail(self, lines: int = 30) -> str:
        """Return the end of the output of each node."""
        tails = [(node.number, node.process.log_tail(lines)) for node in self._nodes]
        return "\n".join(f"node {number}:\n{tail}" for number, tail in tails if tail)

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
        _answer(self.admin.create_topics([topic], operation_timeout=REQUEST_TIMEOUT_S)[name])
        wait_until(
            lambda: self._has_leaders(name, partitions),
            f'all partitions of topic "{name}" to have leaders',
        )

    def delete_topic(self, name: str) -> None:
        """Delete a topic with its records."""
        _answer(self.admin.delete_topics([name], operation_timeout=REQUEST_TIMEOUT_S)[name])
        wait_until(lambda: name not in self.topics(), f'topic "{name}" to be deleted')

    def add_partitions(self, name: str, total: int) -> None:
        """Increase the number of partitions to `total`."""
        request = [NewPartitions(name, total)]
        _answer(self.admin.create_partitions(request, operation_timeout=REQUEST_TIMEOUT_S)[name])
        wait_until(
            lambda: self._has_leaders(name, total), f'topic "{name}" to have {total} partitions'
        )

    def describe_topic(self, name: str) -> TopicDescription:
        """Return the current description of a topic, including its id."""
        descriptions: list[TopicDescription] = []

        def describe() -> bool:
            # The client sends the request to the last known controller. If that node was killed,
            # the client repeats the request until it learns of another controller. A listing of
            # topics updates its metadata.
            self.topics()
            futures = self.admin.describe_topics(TopicCollection([name]), request_timeout=2.0)
            try:
                descriptions.append(_answer(futures[name]))
            except KafkaException as error:
                if error.args[0].code() != KafkaError._TIMED_OUT:
                    raise
            return bool(descriptions)

        wait_until(describe, f'kafka to describe topic "{name}"')
        return descriptions[0]

    def topics(self) -> set[str]:
        """Return the names of all topics."""
        return set(self.admin.list_topics(timeout=REQUEST_TIMEOUT_S).topics)

    def _has_leaders(self, name: str, partitions: int) -> bool:
        try:
            described = self.describe_topic(name).partitions
            if len(described) != partitions or any(part.leader is None for part in described):
                return False
            # The leader of a partition may not know of it yet.
            latest = {TopicPartition(name, part.id): _LATEST for part in described}
            futures = self.admin.list_offsets(latest, request_timeout=REQUEST_TIMEOUT_S)
            return all(_answer(future).offset >= 0 for future in futures.values())
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
        return _Node(number, folder, ports, _random_uuid(), ServerProcess(folder))

    def _select(self, node: int | None) -> list[_Node]:
        return self._nodes if node is None else [self._nodes[node - 1]]

    def _format(self, node: _Node) -> None:
        file = node.folder / "server.properties"
        file.write_text("".join(f"{k}={v}\n" for k, v in self._properties(node).items()))
        (node.folder / "log4j2.properties").write_text(_LOGGING)
        command = ["kafka.tools.StorageTool", "format", "-t", self._cluster_id, "-c", str(file)]
        if len(self._nodes) == 1:
            command.append("--standalone")
        else:
            voters = [
                f"{voter.number}@{HOST}:{voter.ports['CONTROLLER']}:{voter.directory_id}"
                for voter in self._nodes
            ]
            command += ["--initial-controllers", ",".join(voters)]
        for user, password in self._users.items():
            for mechanism in ("SCRAM-SHA-256", "SCRAM-SHA-512"):
                command += ["-S", f"{mechanism}=[name={user},password={password}]"]
        process = subprocess.run(
            self._java_command(node, *command),
            cwd=node.folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if process.returncode != 0:
            shutil.rmtree(node.folder / "data", ignore_errors=True)
            raise UsageError(
                f"could not format the storage of kafka node {node.number}",
                detail=f"{process.stdout}{process.stderr}",
            )

    def _properties(self, node: _Node) -> dict[str, object]:
        listeners = ",".join(f"{name}://{HOST}:{port}" for name, port in node.ports.items())
        advertised = ",".join(
            f"{name}://{_host_name(name)}:{port}"
            for name, port in node.ports.items()
            if name != "CONTROLLER"
        )
        kinds = {name: name for name in node.ports} | {"CONTROLLER": "PLAINTEXT"}
        properties: dict[str, object] = {
            "process.roles": "broker,controller",
            "node.id": node.number,
            "controller.listener.names": "CONTROLLER",
            "controller.quorum.bootstrap.servers": ",".join(
                f"{HOST}:{voter.ports['CONTROLLER']}" for voter in self._nodes
            ),
            "listeners": listeners,
            "advertised.listeners": advertised,
            "listener.security.protocol.map": ",".join(f"{k}:{v}" for k, v in kinds.items()),
            "inter.broker.listener.name": "PLAINTEXT",
            "log.dirs": node.folder / "data",
        }
        if self._tls is not None:
            properties |= self._tls_properties(node, self._tls)
        if self._users:
            properties |= self._sasl_properties(node)
        return properties | self.settings

    def _tls_properties(self, node: _Node, tls: Tls) -> dict[str, object]:
        keystore = node.folder / "server.pem"
        keystore.touch(mode=0o600)
        keystore.write_bytes(tls.key.read_bytes() + tls.certificate.read_bytes())
        return {
            "ssl.keystore.type": "PEM",
            "ssl.keystore.location": keystore,
            "ssl.truststore.type": "PEM",
            "ssl.truststore.location": tls.authority,
            "ssl.client.auth": tls.clients,
        }

    def _sasl_properties(self, node: _Node) -> dict[str, object]:
        package = "org.apache.kafka.common.security"
        users = " ".join(f'user_{name}="{password}"' for name, password in self._users.items())
        properties: dict[str, object] = {}
        for name in node.ports:
            if name.startswith("SASL_"):
                prefix = f"listener.name.{name.lower()}"
                properties[f"{prefix}.sasl.enabled.mechanisms"] = (
                    "PLAIN,SCRAM-SHA-256,SCRAM-SHA-512"
                )
                properties[f"{prefix}.plain.sasl.jaas.config"] = (
                    f"{package}.plain.PlainLoginModule required {users};"
                )
                for scram in ("scram-sha-256", "scram-sha-512"):
                    properties[f"{prefix}.{scram}.sasl.jaas.config"] = (
                        f"{package}.scram.ScramLoginModule required;"
                    )
        return properties

    def _java_command(self, node: _Node, *arguments: str) -> list[str]:
        logging = (node.folder / "log4j2.properties").as_uri()
        return [
            *(str(self._java.program), *JAVA_OPTIONS, f"-Dlog4j2.configurationFile={logging}"),
            *("-cp", self._classes, *arguments),
        ]

    def _launch(self, node: _Node) -> None:
        properties = str(node.folder / "server.properties")
        command = self._java_command(node, "kafka.Kafka", properties)
        node.process.start(end_with_parent(command, "KILL"))

    def _await_answer(self) -> None:
        """Wait until every running node is in the cluster metadata."""
        for node in self._nodes:
            if node.process.running:
                self._await(lambda node=node: _listens(node.ports["PLAINTEXT"]), "to listen")  # type: ignore[misc]
        running = {node.number for node in self._nodes if node.process.running}
        # Without a majority there is no controller that could answer.
        if len(running) * 2 > len(self._nodes):
            self._await(lambda: running <= self._registered(), "to answer")

    def _registered(self) -> set[int]:
        try:
            cluster = _answer(self.admin.describe_cluster(request_timeout=2.0))
        except KafkaException:
            return set()
        return {node.id for node in cluster.nodes}

    def _await(self, condition: Callable[[], bool], description: str) -> None:
        def check() -> bool:
            for node in self._nodes:
                if node.process.status not in (None, *_ENDED_ON_REQUEST):
                    raise UsageError(
                        f"kafka node {node.number} did not start", detail=self.log_tail()
                    )
            return condition()

        wait_until(check, f"kafka {description}", log=self.log_tail)

    def _end(self, node: int | None, number: signal.Signals) -> None:
        processes = [one.process for one in self._select(node) if one.process.running]
        for process in processes:
            process.signal(number)
        for process in processes:
            process.wait_or_kill()


_PINS: Final = Path(__file__).with_name("kafka.txt")

_ENDED_ON_REQUEST: Final = (-signal.SIGKILL, -signal.SIGTERM, 128 + signal.SIGTERM, 0)


def _replicated(nodes: int) -> dict[str, object]:
    in_sync = 2 if nodes > 2 else 1
    return {
        "default.replication.factor": nodes,
        "min.insync.replicas": in_sync,
        "offsets.topic.replication.factor": nodes,
        "transaction.state.log.replication.factor": nodes,
        "transaction.state.log.min.isr": in_sync,
        "share.coordinator.state.topic.replication.factor": nodes,
        "share.coordinator.state.topic.min.isr": in_sync,
    }


def _host_name(protocol: str) -> str:
    """Return the host name that matches the certificate of a listener."""
    return "localhost" if protocol.endswith("SSL") else HOST


def _random_uuid() -> str:
    """Return a random UUID in the form of Kafka."""
    return base64.urlsafe_b64encode(b"\0" + os.urandom(15)).decode().rstrip("=")


def _listens(port: int) -> bool:
    with socket.socket() as connection:
        connection.settimeout(1)
        return connection.connect_ex((HOST, port)) == 0


def _answer(future: "Future[_Result]") -> _Result:
    return future.result(REQUEST_TIMEOUT_S + 5)


# Command line.


def main() -> int:
    """Run a broker until Ctrl-C, on its usual port if that is free."""
    port = free_port() if _listens(DEFAULT_PORT) else DEFAULT_PORT
    print("starting Apache Kafka; the first start downloads its jars (44 MB)", flush=True)
    try:
        broker = KafkaBroker(port=port, settings={"auto.create.topics.enable": "true"})
    except UsageError as error:
        print("\n".join([str(error), *getattr(error, "__notes__", [])]), file=sys.stderr)
        return 1
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    with broker:
        print(_WELCOME.format(bootstrap=broker.bootstrap, folder=broker.folder), flush=True)
        if port != DEFAULT_PORT:
            print(f"Port {DEFAULT_PORT} is in use; the broker listens on port {port}.", flush=True)
        while not ended.is_set() and broker.pids:
            SYSTEM_CLOCK.wait(ended, 1_000)
        if not ended.is_set():
            print(f"the broker ended:\n{broker.log_tail()}", file=sys.stderr)
            return 1
    return 0


_WELCOME: Final = """
Kafka listens on {bootstrap}, without TLS or passwords. The first write to a topic creates it.
The records are in {folder}, which is removed when the broker ends. Ctrl-C ends it.

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
