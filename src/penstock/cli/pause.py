"""`penstock pause` and `penstock resume`: a task that rests, and goes on."""

from penstock import persist
from penstock.catalog.json_rows import encode_line
from penstock.cli.control import Wait, asked, here, place_of
from penstock.cli.options import SETTINGS, AsJson, Location, Task
from penstock.persist.state_store import PAUSED, StateStore

__all__ = ["pause", "resume"]


def pause(location: Location, name: Task, wait: Wait = 60, as_json: AsJson = False) -> None:
    """Let a source or a materialization rest, also when it is started again, until resumed.

    What is durable stays readable. A paused source's slot keeps the server's log from being
    removed; a paused materialization keeps history from being compacted away.
    """
    _tell("pause", location, name, wait, as_json=as_json)


def resume(location: Location, name: Task, wait: Wait = 60, as_json: AsJson = False) -> None:
    """Let a source or a materialization go on that was paused, or had stopped with an error."""
    _tell("resume", location, name, wait, as_json=as_json)


def _tell(verb: str, location: str, name: str, wait: int, *, as_json: bool) -> None:
    url = place_of(location, name).url
    running = asked(url, verb, wait=wait) is not None
    if not running:
        with persist.open(url, writer=here(verb), settings=SETTINGS) as client:
            StateStore(client, name).put({PAUSED: True if verb == "pause" else None})
    if as_json:
        print(encode_line({"name": name, "done": verb, "running": running}))
    else:
        print(f"{name}: {verb}d" + ("" if running else "; it does not run now"))
