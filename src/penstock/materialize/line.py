"""The line from tasks to the driver, over which the rounds of a job are kept.

It is a socket beside the driver. Whoever speaks there must know a secret of this job
(HMAC, both ways), as what is said is pickled.
"""

import os
import socket
import threading
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import (
    Client,
    Connection,
    Listener,
    answer_challenge,
    deliver_challenge,
)
from typing import TYPE_CHECKING, Any

from penstock.materialize.rounds import NotLogged, Rounds, Told

if TYPE_CHECKING:
    from penstock.materialize.shard import ShardPlan

__all__ = ["Address", "Line", "RoundsServer"]


@dataclass(frozen=True, slots=True)
class Address:
    """Where the driver listens, and what must be known there."""

    host: str
    port: int
    secret: bytes

    def __repr__(self) -> str:
        return f"Address({self.host}:{self.port})"


class RoundsServer:
    """The driver's end, for one job."""

    def __init__(self, rounds: Rounds, host: str, secret: bytes, count: int) -> None:
        self._rounds = rounds
        self._listener = Listener((host, 0), backlog=2 * count)
        self._secret = secret
        self.address = Address(host, int(self._listener.address[1]), secret)
        self._closed = False
        self._lines: list[tuple[Connection[Any, Any], threading.Thread]] = []
        self._seen: set[int] = set()
        self._thread = threading.Thread(target=self._accept, name="rounds", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Hang up, once all was heard that was said; tasks that still wait fail."""
        self._closed = True
        self._rounds.fail()
        with suppress(OSError):
            # Wakes the thread, if it still waits for somebody.
            socket.create_connection((self.address.host, self.address.port), timeout=1).close()
        self._listener.close()
        self._thread.join()
        for line, thread in self._lines:
            _end(line, socket.SHUT_RD)  # What has come already is still read.
            thread.join()
            line.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                line = self._listener.accept()
            except OSError:
                continue
            thread = threading.Thread(target=self._serve, args=(line,), name="shard", daemon=True)
            thread.start()
            self._lines.append((line, thread))

    def _serve(self, line: "Connection[Any, Any]") -> None:
        try:
            # Here, so that whoever calls and says nothing keeps nobody waiting.
            deliver_challenge(line, self._secret)
            answer_challenge(line, self._secret)
        except (AuthenticationError, EOFError, OSError):
            _end(line, socket.SHUT_RDWR)
            return
        try:
            at: int = line.recv()
            if at in self._seen:
                self._rounds.fail()  # It was tried again, so the first of them is lost.
            self._seen.add(at)
            line.send(not self._rounds.broken)
            while (said := line.recv()) is not None:
                verb, *what = said
                match verb:
                    case "offer":
                        line.send(self._rounds.offer(at))
                    case "commit":
                        line.send(self._rounds.commit(at, *what))
                    case _:
                        self._rounds.settled(at, *what)
        except (NotLogged, EOFError, OSError):
            self._rounds.fail()
        except BaseException:
            self._rounds.fail()
            raise
        finally:
            _end(line, socket.SHUT_RDWR)


def _end(line: "Connection[Any, Any]", how: int) -> None:
    """Hang up, and leave it to its owner to close it: a number of a file may be used again."""
    with socket.socket(fileno=os.dup(line.fileno())) as end, suppress(OSError):
        end.shutdown(how)


class Line:
    """A task's end."""

    def __init__(self, address: Address, at: int) -> None:
        """Call the driver.

        Raises:
            NotLogged: it does not wait for this task any more.
        """
        try:
            self._line = Client((address.host, address.port), authkey=address.secret)
        except (OSError, EOFError, AuthenticationError) as error:
            raise _lost(error) from error
        if not self._ask(at):
            self._line.close()
            raise NotLogged(detail="Another shard has failed.")

    def offer(self) -> "ShardPlan | None":
        """As `Rounds` has it."""
        found: ShardPlan | None = self._ask(("offer",))
        return found

    def commit(self, told: Told) -> bool:
        """As `Rounds` has it."""
        return bool(self._ask(("commit", told)))

    def settled(self, acknowledged_ms: int) -> None:
        """As `Rounds` has it."""
        self._say(("settled", acknowledged_ms))

    def close(self, *, done: bool) -> None:
        """Hang up; if not `done`, no other shard waits for this one."""
        with suppress(NotLogged):
            if done:
                self._say(None)
        self._line.close()

    def _ask(self, what: Any) -> Any:
        self._say(what)
        try:
            return self._line.recv()
        except (OSError, EOFError) as error:
            raise _lost(error) from error

    def _say(self, what: Any) -> None:
        try:
            self._line.send(what)
        except OSError as error:
            raise _lost(error) from error


def _lost(error: Exception) -> NotLogged:
    return NotLogged(detail=f"The driver is not there any more: {type(error).__name__}.")
