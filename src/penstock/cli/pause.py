"""`penstock pause` and `penstock resume`: pause a task, and resume it."""

from penstock import persist
from penstock.catalog import encode_line
from penstock.cli.control import Wait, local_writer_id, locate_task, request_owner
from penstock.cli.options import SETTINGS, AsJson, Location, Task
from penstock.persist.state_store import PAUSED, StateStore

__all__ = ["pause", "resume"]


def pause(location: Location, name: Task, wait: Wait = 60, as_json: AsJson = False) -> None:
    """Pause a source or a materialization until it is resumed, across restarts.

    Durable data stays readable. The slot of a paused source retains WAL on the server; a paused
    materialization retains history. Both grow.
    """
    _request("pause", location, name, wait, as_json=as_json)


def resume(location: Location, name: Task, wait: Wait = 60, as_json: AsJson = False) -> None:
    """Resume a source or a materialization that was paused, or that stopped with an error."""
    _request("resume", location, name, wait, as_json=as_json)


def _request(command: str, location: str, name: str, wait: int, *, as_json: bool) -> None:
    url = locate_task(location, name).url
    running = request_owner(url, command, wait=wait) is not None
    if not running:
        with persist.open(url, writer=local_writer_id(command), settings=SETTINGS) as client:
            StateStore(client, name).put({PAUSED: True if command == "pause" else None})
    if as_json:
        print(encode_line({"name": name, "done": command, "running": running}))
    else:
        print(f"{name}: {command}d" + ("" if running else "; no process runs it"))
