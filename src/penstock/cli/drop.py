"""`penstock drop`: a source or a materialization, and all that was made for it."""

from typing import Annotated, Final

import typer

from penstock.catalog.json_rows import encode_line
from penstock.cli.control import AlreadyDropped, Place, Wait, asked, here, place_of
from penstock.cli.options import AsJson, Location, Task
from penstock.errors import UsageError

__all__ = ["drop"]

KEPT: Final = "; its target is kept: to write there again, raise backfill"


def drop(
    location: Location,
    name: Task,
    keep_target: Annotated[
        bool,
        typer.Option("--keep-target", help="Leave what a materialization wrote where it is."),
    ] = False,
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="Drop a source to which materializations are bound; they stop until they are "
            "bound to another.",
        ),
    ] = False,
    wait: Wait = 600,
    as_json: AsJson = False,
) -> None:
    """Drop a source, with its slot and its collections; or a materialization, with its target.

    A running owner does it and answers. If nobody runs it, it is done here, by what the
    catalog knows of it; variables that its definition uses must be set.
    """
    try:
        place = place_of(location, name)
    except AlreadyDropped:
        place = None
    if place is not None:
        if not force:
            _check_nothing_is_bound(place, location)
        answer = asked(place.url, "drop", keep_target=keep_target, wait=wait)
        if answer is None and _is_still_there(location, name):
            _drop_here(place, location, keep_target=keep_target)
    if as_json:
        done = {"name": name, "done": "drop", "kept_target": keep_target}
        print(encode_line({**done, "already": place is None}))
    elif place is None:
        print(f"{name}: was dropped already")
    else:
        print(f"{name}: dropped" + (KEPT if keep_target else ""))


def _is_still_there(location: str, name: str) -> bool:
    """Return whether there is something to drop: an owner that died may have dropped it."""
    try:
        place_of(location, name)
    except AlreadyDropped:
        return False
    return True


def _check_nothing_is_bound(place: Place, location: str) -> None:
    from penstock.catalog.diff import bound_materializations

    if bound := bound_materializations(place.name, place.known()):
        told = (f'materialization "{each}" is bound to {what}' for each, what in bound.items())
        raise UsageError(
            f'source "{place.name}" cannot be dropped: {", ".join(told)}',
            hint=f"First: penstock drop {location} {next(iter(bound))}, with --keep-target to "
            "leave what it wrote. Or say --force; what is bound then stops.",
        )


def _drop_here(place: Place, location: str, *, keep_target: bool) -> None:
    """Drop what nobody runs."""
    # Sources bring a compiler along, which no other verb should wait for.
    from penstock.catalog.objects import remove_object
    from penstock.engine.dropping import drop_object

    known = [
        each
        for each in place.known()
        if each.name == place.name and each.type in ("source", "materialization")
    ]
    if not known or place.lake is None:
        raise UsageError(
            f'location "{location}" knows nothing of "{place.name}" but its storage location',
            hint="Start it once with penstock up FILE, and drop it then.",
        )
    drop_object(known[0], place.lake, writer=here("drop"), keep_target=keep_target)
    remove_object(known[0], place.lake)
