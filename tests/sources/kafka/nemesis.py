"""Nemesis for Kafka: a topic under load, a pipeline that ingests it, and injected failures.

    python -m tests.sources.kafka.nemesis --for SECONDS [--seed N]

Producers send without pause in transactions that they commit, abort or leave open for a while.
At the same time the nemesis kills the pipeline's process and the broker, and adds partitions.
After each round, `checker.py` compares the stored contents with the records of a read_committed
consumer. It compares them again after a restart of the pipeline, which must not change them. The
nemesis runs rounds until the time is over and prints the seed of each. At the first violation it
exits with status 1 and prints the folder and the violations.
"""

import logging
import random
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import yaml
from confluent_kafka import KafkaException, Producer

from penstock.clock import SYSTEM_CLOCK
from penstock.servers.kafka import KafkaBroker
from tests.e2e.process import Up, until
from tests.nemesis_driver import Tally, Turn, argument_parser, in_folder, run_nemesis, say, wait
from tests.sources.kafka.checker import Stored, bound_ends, stored, wrong_in
from tests.sources.kafka.clients import consume, ends

TOPIC = "clicks"
SOURCE = "clicks"
MOST_PARTITIONS = 6
START_PATIENCE_S = 900
"""Spark and the first job of a process took over 240 s on two cores with a load of 25."""

MOST_UNBOUND = 4_000
"""Limit of records ahead of the pipeline: a restart on a busy machine takes long."""

QUIET = logging.getLogger("nemesis.client")
QUIET.setLevel(logging.CRITICAL + 1)


class Sender:
    """Producer that sends in transactions and aborts some of them."""

    def __init__(self, round_: "Round", name: str, seed: int) -> None:
        self._round = round_
        self._name = name
        self._chance = random.Random(seed)
        self._stop = threading.Event()
        self._producer: Producer | None = None
        self._sent = 0
        self._thread = threading.Thread(target=self._run, name=name)

    def __enter__(self) -> "Sender":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop sending, and leave no transaction open."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                if self._round.sent_records - self._round.bound_records < MOST_UNBOUND:
                    self._transaction()
            except KafkaException:
                self._give_up()
            SYSTEM_CLOCK.wait(self._stop, self._chance.choice([5, 20, 100]))
        self._producer = None
        # A new producer with the same transactional id aborts the open transaction.
        until(self._restart, "the end of the open transaction")

    def _transaction(self) -> None:
        if self._producer is None and not self._restart():
            return
        assert self._producer is not None
        self._producer.begin_transaction()
        for _ in range(self._chance.randrange(1, 20)):
            self._sent += 1
            self._round.sent_records += 1
            self._producer.produce(
                TOPIC,
                value=f"{self._name} {self._sent}",
                partition=self._chance.randrange(self._round.partitions),
            )
        self._producer.flush(5)
        if self._chance.random() < 0.1:
            SYSTEM_CLOCK.wait(self._stop, 1_500)
        if self._chance.random() < 0.7:
            self._producer.commit_transaction(10)
        else:
            self._producer.abort_transaction(10)

    def _give_up(self) -> None:
        try:
            if self._producer is not None:
                self._producer.abort_transaction(5)
        except KafkaException:
            self._producer = None

    def _restart(self) -> bool:
        producer = Producer(
            self._round.broker.client(
                transactional__id=self._name,
                transaction__timeout__ms=8_000,
                message__timeout__ms=5_000,
                topic__metadata__refresh__interval__ms=500,
            ),
            logger=QUIET,  # It is fenced at times and logs that.
        )
        try:
            producer.init_transactions(5)
        except KafkaException:
            return False
        self._producer = producer
        return True


class Round:
    """One broker and one pipeline, with failures injected for some seconds."""

    def __init__(self, broker: KafkaBroker, folder: Path, seed: int, tally: Tally) -> None:
        self.broker = broker
        self.tally = tally
        self.folder = folder
        self.chance = random.Random(seed)
        self.partitions = 2
        broker.create_topic(TOPIC, partitions=self.partitions)
        self.up: Up | None = None
        self.harmed = 0
        self.sent_records = 0
        self.bound_records = 0
        section: dict[str, Any] = {
            "brokers": broker.bootstrap,
            "topic": TOPIC,
            "format": "text",
            "bite": self.chance.choice([200, 1_000_000]),
        }
        self.log = folder / "output"
        self.file = folder / "pipeline.yaml"
        self.file.write_text(
            yaml.safe_dump(
                {
                    "location": f"file:{folder / 'lake'}",
                    "tick": "100ms",
                    "retain": "1d",
                    "sources": {SOURCE: {"kafka": section}},
                }
            )
        )

    def play(self, seconds: float) -> list[str]:
        """Inject failures until the time is over, wait until all records arrive, return
        violations.
        """
        harms = [*3 * [self.kill_process], self.kill_both, *2 * [self.kill_broker]]
        harms += [self.add_partition]
        try:
            with ExitStack() as stack:
                senders = [
                    stack.enter_context(Sender(self, name, self.chance.getrandbits(32)))
                    for name in ("one", "two")
                ]
                self.start()
                self.await_rows()
                deadline = SYSTEM_CLOCK.boot_ms() + int(seconds * 1_000)
                while self.harmed < 2 or SYSTEM_CLOCK.boot_ms() < deadline:
                    wait(self.chance.choice([300, 2_000, 8_000]))
                    self._bound()
                    harm = self.chance.choice(harms)
                    say(f"  {harm.__name__}")
                    harm()
                    self.harmed += 1
                    if harm == self.add_partition:
                        self.tally.faults[harm.__name__] += 1
                    else:
                        self.tally.kills += 2 if harm == self.kill_both else 1
                for sender in senders:
                    sender.stop()
            self.settle()
        finally:
            self.kill()
        found = stored(self.storage, SOURCE)
        self.tally.observations["records"] += len(found.changes)
        wrong = wrong_in(found, consume(self.broker, TOPIC), self.stable_ends())
        return wrong + self._again(found)

    @property
    def storage(self) -> str:
        return f"file:{self.folder / 'lake' / SOURCE}"

    # Pipeline.

    def start(self, *arguments: str) -> Up:
        self.up = Up(self.folder, "ingest", str(self.file), *arguments, log=self.log)
        return self.up

    def kill(self) -> None:
        if self.up is not None:
            self.up.kill()

    def await_rows(self) -> None:
        """Wait until the first binding is durable."""
        self._await(lambda: bool(self._bound()), "the first binding")

    def settle(self) -> None:
        """Wait until everything up to the last stable offset is bound;

        call it after the producers stop.
        """

        def ended() -> bool:
            try:
                found = [ends(self.broker.admin, TOPIC, each) for each in range(self.partitions)]
            except KafkaException:
                # Only listing the topics makes this client notice that a leader was restarted.
                self.broker.topics()
                return False
            return all(stable == end for _, stable, end in found)

        until(ended, "all transactions to have ended")
        reached = {each: end for each, end in self.stable_ends().items() if end}
        # A deadline for the whole backlog would measure the load of the machine.
        while (bound := self._bound()) != reached:
            self._await_move(bound)

    def stable_ends(self) -> dict[int, int]:
        return {each: ends(self.broker.admin, TOPIC, each)[1] for each in range(self.partitions)}

    # Failures.

    def kill_process(self) -> None:
        self.kill()
        wait(self.chance.choice([0, 500]))
        self.start()
        if self.chance.random() < 0.7:
            # Otherwise the next failure hits it during startup.
            self._await_move(self._bound())

    def kill_broker(self) -> None:
        self.broker.kill()
        wait(self.chance.choice([0, 3_000]))
        self.broker.start()

    def kill_both(self) -> None:
        self.broker.kill()
        self.kill()
        self.broker.start()
        self.start()
        self._await_move(self._bound())

    def add_partition(self) -> None:
        if self.partitions < MOST_PARTITIONS:
            self.broker.add_partitions(TOPIC, self.partitions + 1)
            self.partitions += 1

    # Inspection.

    def _again(self, before: Stored) -> list[str]:
        """Restart the pipeline with nothing to do; return its effects on the stored contents."""
        status = self.start("--once").wait()
        after = stored(self.storage, SOURCE)
        wrong = [] if status == 0 else [f"it ended with {status}: {self.output()}"]
        if not after.begins_with(before) or len(after.changes) != len(before.changes):
            wrong.append("a start with nothing to do has changed the stored contents")
        return wrong

    def _bound(self) -> dict[int, int]:
        if not (self.folder / "lake" / SOURCE).exists():
            return {}
        bound = bound_ends(self.storage, SOURCE)
        self.bound_records = sum(bound.values())
        return bound

    def _await_move(self, before: dict[int, int]) -> None:
        self._await(lambda: self._bound() != before, f"a binding after {before}")

    def _await(self, claim: Callable[[], bool], what: str) -> None:
        def holds() -> bool:
            assert self.up is not None
            self.up.check()
            return claim()

        try:
            until(holds, what, START_PATIENCE_S)
        except AssertionError as error:
            error.add_note(self.output())
            raise

    def output(self) -> str:
        """Return the end of the processes' output."""
        return self.log.read_text(errors="replace")[-4_000:]


def play(seed: int, seconds: float, tally: Tally) -> list[str]:
    """Run one round on a new broker; return the violations."""

    def on_a_broker(folder: Path) -> list[str]:
        with KafkaBroker() as broker:
            return Round(broker, folder, seed, tally).play(seconds)

    return in_folder(on_a_broker)


def main() -> int:
    tally = Tally("kafka")

    def play_turn(turn: Turn) -> list[str]:
        return play(turn.seed, max(10, min(60, turn.seconds)), tally)

    return run_nemesis(argument_parser(__doc__).parse_args(), tally, play_turn)


if __name__ == "__main__":
    sys.exit(main())
