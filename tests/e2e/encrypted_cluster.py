"""A pipeline on a cluster whose network is recorded: no document crosses it in plaintext.

    python -m tests.e2e.encrypted_cluster FOLDER TEXT

The process needs a network namespace of its own, with the right to configure it. Master, worker
and `penstock up FOLDER/pipeline.yaml --once` use an address that is not loopback, as hosts on a
network do. The last line of the output is a JSON object.
"""

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tests.e2e.cluster import Cluster
from tests.e2e.process import Up

HOST: Final = "192.0.2.1"
"""An address for documentation (RFC 5737): it exists in this namespace only."""

ALL_PROTOCOLS: Final = 3
"""ETH_P_ALL of Linux."""

PACKET_BYTES: Final = 1 << 17
BUFFER_BYTES: Final = 64 << 20


def main(folder: Path, text: str) -> None:
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    subprocess.run(["ip", "address", "add", f"{HOST}/32", "dev", "lo"], check=True)
    with recorded_packets(folder / "packets") as packets:
        cluster = Cluster(folder, {}, host=HOST)
        try:
            cluster.start(workers=1)
            arguments = ("up", "pipeline.yaml", "--master", cluster.url, "--once", "--http", "none")
            with Up(folder, *arguments, environment={"SPARK_LOCAL_IP": HOST}) as up:
                status = up.wait()
        finally:
            cluster.close()
    documents = packets.read_bytes().count(text.encode())
    with recorded_packets(folder / "control") as packets:
        send_in_plaintext(text)
    control = packets.read_bytes().count(text.encode())
    sys.stdout.write(
        json.dumps({"status": status, "documents": documents, "control": control}) + "\n"
    )


@contextmanager
def recorded_packets(file: Path) -> Iterator[Path]:
    """Record every packet of the namespace in a file."""
    ended = threading.Event()
    with (
        socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ALL_PROTOCOLS)) as tap,
        file.open("wb") as record,
    ):
        tap.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
        tap.settimeout(0.2)

        def write_packets() -> None:
            while True:
                try:
                    record.write(tap.recv(PACKET_BYTES))
                except TimeoutError:
                    if ended.is_set():
                        return

        recorder = threading.Thread(target=write_packets)
        recorder.start()
        try:
            yield file
        finally:
            ended.set()
            recorder.join()


def send_in_plaintext(text: str) -> None:
    with (
        socket.create_server((HOST, 0)) as server,
        socket.create_connection(server.getsockname()) as client,
    ):
        client.sendall(text.encode())
        connection, _ = server.accept()
        with connection:
            connection.recv(len(text))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
