"""`penstock drop`: a source or a materialization, and all that was made for it."""

from typing import Annotated, Final

import typer

from penstock.catalog.rows import encode_line
from penstock.cli.asking import Wait, asked, hears, here, place_of
from penstock.cli.options import AsJson, Location
from penstock.errors import UsageError

__all__ = ["drop"]

KEPT: Final = "; its target is kept: to write there again, raise backfill"


def drop(
    location: Location,
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Name of a source or a materialization.")
    ],
    keep_target: Annotated[
        bool,
        typer.Option("--keep-target", help="Leave what a materialization wrote where it is."),
    ] = False,
    wait: Wait = 600,
    as_json: AsJson = False,
) -> None:
    """Drop a source, with its slot and its collections; or a materialization, with its target.

    A running owner does it and answers. If nobody runs it, it is done here, by what the
    catalog knows of it; variables that its definition uses must be set.
    """
    # Sources bring a compiler along, which no other verb should wait for.
    from penstock.catalog.objects import forget_object, known_objects
    from penstock.engine.dropping import drop_object

    url = place_of(location, name)
    if hears(url):
        asked(url, "drop", keep_target=keep_target, wait=wait)
    else:
        known = [
            each
            for each in known_objects(location)
            if each.name == name and each.type in ("source", "materialization")
        ]
        if not known:
            raise UsageError(
                f'location "{location}" knows nothing of "{name}" but its storage location',
                hint="Start it once with penstock up FILE, and drop it then.",
            )
        drop_object(known[0], location, writer=here("drop"), keep_target=keep_target)
        forget_object(known[0], location)
    if as_json:
        print(encode_line({"name": name, "done": "drop", "kept_target": keep_target}))
    else:
        print(f"{name}: dropped" + (KEPT if keep_target else ""))
