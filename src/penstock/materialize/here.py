"""Shards as threads of this process, without a Spark cluster."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from penstock.materialize.rounds import Commits, NotLogged, Rounds, Told
from penstock.materialize.shard import ShardPlan, cancel_sessions, run_shard

__all__ = ["TasksHere"]


class TasksHere:
    """Implementation of `Jobs` with one thread for each shard."""

    def run(self, plans: Sequence[ShardPlan], commits: Commits) -> None:
        """Run one thread for each plan; see `Jobs.run`.

        Raises the error of the driver if there is one, else the first error of a shard.
        """
        rounds = Rounds(len(plans), commits, lambda _: True)

        def run(at: int) -> None:
            try:
                run_shard(plans[at], _Here(rounds, at))
            except BaseException:
                rounds.fail()
                raise

        with ThreadPoolExecutor(len(plans)) as pool:
            futures = [pool.submit(run, at) for at in range(len(plans))]
        if rounds.error is not None:
            raise rounds.error
        errors = [error for each in futures if (error := each.exception()) is not None]
        # Raise the cause first. NotLogged in the other shards is only its consequence.
        for error in sorted(errors, key=lambda each: isinstance(each, NotLogged)):
            raise error

    def cancel(self, materialization: str) -> None:
        """Cancel the sessions of the materialization; see `Jobs.cancel`."""
        cancel_sessions(materialization)


@dataclass(frozen=True, slots=True)
class _Here:
    rounds: Rounds
    at: int

    def opened(self) -> None:
        self.rounds.opened(self.at)

    def offer(self) -> ShardPlan | None:
        return self.rounds.offer(self.at)

    def commit(self, told: Told) -> bool:
        return self.rounds.commit(self.at, told)

    def settled(self, acknowledged_ms: int) -> None:
        self.rounds.settled(self.at, acknowledged_ms)
