"""`penstock plan`: what a file would change, and nothing done."""

import sys

from penstock.catalog.json_rows import encode_line
from penstock.cli.options import AsJson, File
from penstock.cli.run_options import print_change
from penstock.errors import UsageError

__all__ = ["plan"]


def plan(file: File, as_json: AsJson = False) -> None:
    """Show what `penstock up FILE` would create, alter, backfill, drop, or refuse and why.

    Connects to all sources and endpoints and changes nothing. Exits with 1 if there is a problem.
    """
    from penstock.engine.checking import planned

    found = planned(file)
    if as_json:
        for change in found:
            print(
                encode_line(
                    {
                        "action": change.action,
                        "type": change.type,
                        "name": change.name,
                        "what": change.what,
                        "detail": change.detail,
                        "hint": change.hint,
                    }
                )
            )
    elif not found:
        print("nothing changes")
    for change in () if as_json else found:
        print_change(change, sys.stdout)
    if not as_json and any(change.action == "drop" for change in found):
        print(f"what it drops it drops only if allowed to: penstock up {file} --allow-drop")
    if problems := [change for change in found if change.is_problem]:
        raise UsageError(
            f"plan has {len(problems)} problem{'s' if problems[1:] else ''}",
            hint="Change the file, or what it names, as the hint of each problem says.",
        )
