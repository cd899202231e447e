"""State table of a supervised task.

    starting ──run──► running ──retry──► restarting ──run──► running
                        │ ──fail───► stopped ──resume──► starting
                        │ ──pause──► paused  ──resume──► starting
                        └ ──drop───► ended

A task that is stopped or ended keeps this state after a further error: the first error has
priority, and a dropped task has none. Only a newer owner of the lock (`EXIT`) overrides it. The
task thread sets all states. Pause and the error of a stopped task are durable, in the state of
the task; the other states last as long as the process.
"""

from collections.abc import Mapping
from enum import Enum, StrEnum, auto
from typing import Final

from penstock.errors import InternalError
from penstock.retry import Policy

__all__ = ["TRANSITIONS", "Event", "State", "event_of", "next_state"]


class State(StrEnum):
    """State of a supervised task."""

    STARTING = "starting"
    """The loop is not built yet."""

    RUNNING = "running"
    """The loop runs, or resumes after a transient error."""

    RESTARTING = "restarting"
    """The task waits before the next attempt."""

    PAUSED = "paused"
    """A user paused the task. Durable: a restarted process finds it paused."""

    STOPPED = "stopped"
    """An error stopped the task. The error is durable; a restarted process tries again."""

    ENDED = "ended"
    """The task has ended, or was dropped."""


class Event(Enum):
    """Event that may change the state of a task."""

    RUN = auto()
    """The loop is built and runs."""

    PAUSE = auto()
    """The durable state of the task says that it is paused."""

    RESUME = auto()
    """A user resumed the task."""

    RETRY = auto()
    """An error occurred after which the task restarts."""

    FAIL = auto()
    """An error occurred after which the task stops."""

    EXIT = auto()
    """An error ends the process."""

    DROP = auto()
    """A user dropped the task."""

    END = auto()
    """The thread of the task ended without an error."""


TRANSITIONS: Final[Mapping[tuple[State, Event], State]] = {
    (State.STARTING, Event.RUN): State.RUNNING,
    (State.STARTING, Event.PAUSE): State.PAUSED,
    (State.STARTING, Event.RESUME): State.STARTING,
    (State.STARTING, Event.RETRY): State.RESTARTING,
    (State.STARTING, Event.FAIL): State.STOPPED,
    (State.STARTING, Event.EXIT): State.STOPPED,
    (State.STARTING, Event.DROP): State.ENDED,
    (State.STARTING, Event.END): State.ENDED,
    (State.RUNNING, Event.RUN): State.RUNNING,
    (State.RUNNING, Event.PAUSE): State.PAUSED,
    (State.RUNNING, Event.RESUME): State.STARTING,
    (State.RUNNING, Event.RETRY): State.RESTARTING,
    (State.RUNNING, Event.FAIL): State.STOPPED,
    (State.RUNNING, Event.EXIT): State.STOPPED,
    (State.RUNNING, Event.DROP): State.ENDED,
    (State.RUNNING, Event.END): State.ENDED,
    (State.RESTARTING, Event.RUN): State.RUNNING,
    (State.RESTARTING, Event.PAUSE): State.PAUSED,
    (State.RESTARTING, Event.RESUME): State.STARTING,
    (State.RESTARTING, Event.RETRY): State.RESTARTING,
    (State.RESTARTING, Event.FAIL): State.STOPPED,
    (State.RESTARTING, Event.EXIT): State.STOPPED,
    (State.RESTARTING, Event.DROP): State.ENDED,
    (State.RESTARTING, Event.END): State.ENDED,
    (State.PAUSED, Event.PAUSE): State.PAUSED,
    (State.PAUSED, Event.RESUME): State.STARTING,
    (State.PAUSED, Event.RETRY): State.RESTARTING,
    (State.PAUSED, Event.FAIL): State.STOPPED,
    (State.PAUSED, Event.EXIT): State.STOPPED,
    (State.PAUSED, Event.DROP): State.ENDED,
    (State.PAUSED, Event.END): State.ENDED,
    (State.STOPPED, Event.PAUSE): State.PAUSED,
    (State.STOPPED, Event.RESUME): State.STARTING,
    (State.STOPPED, Event.RETRY): State.STOPPED,
    (State.STOPPED, Event.FAIL): State.STOPPED,
    (State.STOPPED, Event.EXIT): State.STOPPED,
    (State.STOPPED, Event.DROP): State.ENDED,
    (State.STOPPED, Event.END): State.ENDED,
    (State.ENDED, Event.RETRY): State.ENDED,
    (State.ENDED, Event.FAIL): State.ENDED,
    (State.ENDED, Event.EXIT): State.STOPPED,
    (State.ENDED, Event.END): State.ENDED,
}
"""Next state of each possible pair of state and event."""


def next_state(state: State, event: Event) -> State:
    """Return the state after an event.

    Raises:
        InternalError: the event cannot occur in this state.
    """
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise InternalError(f"task that is {state} cannot {event.name.lower()}") from None


_WITH_RESTARTS: Final = {
    Policy.REPEAT: Event.RETRY,
    Policy.RESUME: Event.RETRY,
    Policy.RESTART: Event.RETRY,
    Policy.REPORT: Event.RETRY,
    Policy.STOP: Event.FAIL,
    Policy.EXIT: Event.EXIT,
}
_WITHOUT_RESTARTS: Final = {
    Policy.REPEAT: Event.FAIL,
    Policy.RESUME: Event.FAIL,
    Policy.RESTART: Event.FAIL,
    Policy.REPORT: Event.EXIT,
    Policy.STOP: Event.FAIL,
    Policy.EXIT: Event.EXIT,
}


def event_of(policy: Policy, *, restarts: bool) -> Event:
    """Return the event of an error that left the loop; `restarts` if tasks are restarted."""
    return (_WITH_RESTARTS if restarts else _WITHOUT_RESTARTS)[policy]
