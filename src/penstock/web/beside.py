"""The page of a lake, served beside what runs on it."""

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from penstock import persist
from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.pipeline.running import Running
from penstock.telemetry import logger
from penstock.web.serving import serve
from penstock.web.view import LakeView

__all__ = ["NONE", "Page", "page_beside"]

log = logger("web")

NONE: Final = "none"
TOKEN: Final = "PENSTOCK_HTTP_TOKEN"
"""The variable with what is asked of whoever looks from elsewhere."""

SAMPLE_EVERY_MS: Final = 1_000
PATIENCE_MS: Final = 5_000
"""A store that is away is told on the page, rather than waited for."""


class Page:
    """Where it is, and what it shows."""

    def __init__(self) -> None:
        self.url = ""
        """Empty if there is none."""

        self._running: Running | None = None

    def watch(self, running: Running) -> None:
        """Show what runs."""
        self._running = running

    def status(self) -> Mapping[str, Mapping[str, Any]]:
        """Of what runs, by name."""
        return {} if self._running is None else self._running.status()


@contextmanager
def page_beside(location: str, address: str, *, clock: Clock = SYSTEM_CLOCK) -> Iterator[Page]:
    """The page of a lake at `address`, or none, until the block ends.

    Raises:
        UsageError: it cannot be there.
    """
    page = Page()
    if address == NONE:
        yield page
        return
    settings = persist.Settings(patience_ms=PATIENCE_MS)
    view = LakeView(location, settings, running=page.status)
    over = threading.Event()

    def sample() -> None:
        while not clock.wait(over, SAMPLE_EVERY_MS):
            try:
                view.sample()
            except Exception:
                log.exception("the page took no sample; it goes on")

    sampling = threading.Thread(target=sample, name="page samples", daemon=True)
    try:
        with serve(view, address, token=os.environ.get(TOKEN)) as served:
            page.url = served.url
            sampling.start()
            yield page
    finally:
        over.set()
        view.close()
