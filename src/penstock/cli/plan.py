"""`penstock plan`: print the changes of a file without making them."""

import sys

from penstock.catalog import encode_line
from penstock.cli.options import AsJson, File
from penstock.cli.run_options import print_change
from penstock.errors import UsageError

__all__ = ["plan"]


def plan(file: File, as_json: AsJson = False) -> None:
    """Print what `penstock up FILE` would create, alter, backfill, drop or refuse.

    Connects to all sources and endpoints and changes nothing. The exit status is 1 if there is a
    problem.
    """
    from penstock.engine import plan_file

    changes = plan_file(file)
    if as_json:
        for change in changes:
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
    elif not changes:
        print("nothing changes")
    for change in () if as_json else changes:
        print_change(change, sys.stdout)
    if not as_json and any(change.action == "drop" for change in changes):
        print(f"drops require the option --allow-drop: penstock up {file} --allow-drop")
    if problems := [change for change in changes if change.is_problem]:
        raise UsageError(
            f"plan has {len(problems)} problem{'s' if problems[1:] else ''}",
            hint="Follow the hint of each problem.",
        )
