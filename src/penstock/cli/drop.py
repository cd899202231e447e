"""`penstock drop`: drop a source or a materialization with everything that it created."""

from typing import Annotated, Final

import typer

from penstock.catalog import encode_line
from penstock.cli.control import (
    AlreadyDropped,
    TaskLocation,
    Wait,
    local_writer_id,
    locate_task,
    request_owner,
)
from penstock.cli.options import AsJson, Location, Task
from penstock.errors import UsageError

__all__ = ["drop"]

KEPT: Final = "; its target is kept; to write to it again, raise backfill"


def drop(
    location: Location,
    name: Task,
    keep_target: Annotated[
        bool,
        typer.Option("--keep-target", help="Keep the resources that a materialization created."),
    ] = False,
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="Drop a source to which materializations are bound. The bindings stop until they "
            "are bound to another collection.",
        ),
    ] = False,
    wait: Wait = 600,
    as_json: AsJson = False,
) -> None:
    """Drop a source with its slot and its collections, or a materialization with its target.

    The running owner executes the drop. Without an owner, this process executes it with the
    definition in the catalog; variables of the definition must be set.
    """
    try:
        task = locate_task(location, name)
    except AlreadyDropped:
        task = None
    if task is not None:
        if not force:
            _check_unbound(task, location)
        response = request_owner(task.url, "drop", keep_target=keep_target, wait=wait)
        if response is None and _still_exists(location, name):
            _drop_locally(task, location, keep_target=keep_target)
    if as_json:
        done = {"name": name, "done": "drop", "kept_target": keep_target}
        print(encode_line({**done, "already": task is None}))
    elif task is None:
        print(f"{name}: was dropped already")
    else:
        print(f"{name}: dropped" + (KEPT if keep_target else ""))


def _still_exists(location: str, name: str) -> bool:
    """Return whether the task still exists: an owner that died may have dropped it."""
    try:
        locate_task(location, name)
    except AlreadyDropped:
        return False
    return True


def _check_unbound(task: TaskLocation, location: str) -> None:
    from penstock.catalog import bound_materializations

    if bound := bound_materializations(task.name, task.known_objects()):
        bindings = (
            f'materialization "{name}" is bound to {collection}'
            for name, collection in bound.items()
        )
        raise UsageError(
            f'source "{task.name}" cannot be dropped: {", ".join(bindings)}',
            hint=f"First run penstock drop {location} {next(iter(bound))}, with --keep-target to "
            "keep its resources. Or use --force, which stops the bindings.",
        )


def _drop_locally(task: TaskLocation, location: str, *, keep_target: bool) -> None:
    """Drop a task that no process runs."""
    # Imported late: sources import a compiler, which is slow to load.
    from penstock.catalog import remove_object
    from penstock.engine import drop_object

    objects = [
        obj
        for obj in task.known_objects()
        if obj.name == task.name and obj.type in ("source", "materialization")
    ]
    if not objects or task.lake is None:
        raise UsageError(
            f'catalog of location "{location}" has no definition of "{task.name}"',
            hint="Start the task once with penstock up FILE, then drop it.",
        )
    drop_object(objects[0], task.lake, writer=local_writer_id("drop"), keep_target=keep_target)
    remove_object(objects[0], task.lake)
