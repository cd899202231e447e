"""`penstock plan`: what a file would change, and nothing done."""

from penstock.catalog.rows import encode_line
from penstock.cli.options import AsJson, File
from penstock.errors import UsageError

__all__ = ["plan"]


def plan(file: File, as_json: AsJson = False) -> None:
    """Show what `penstock up FILE` would create, alter, backfill, drop, or refuse and why.

    Servers and connectors are asked, and nothing is changed anywhere.
    """
    from penstock.engine.checking import planned

    found = planned(file)
    if as_json:
        for each in found:
            print(
                encode_line(
                    {
                        "action": each.action,
                        "type": each.type,
                        "name": each.name,
                        "what": each.what,
                    }
                )
            )
    elif not found:
        print("nothing changes")
    for each in () if as_json else found:
        print(each)
    if not as_json and any(each.action == "drop" for each in found):
        print(f"what it drops it drops only if allowed to: penstock up {file} --allow-drop")
    if refused := [each for each in found if each.action == "refuse"]:
        raise UsageError(
            f"{len(refused)} of these would be refused",
            hint="Change the file, or what it speaks of, as each of them says.",
        )
