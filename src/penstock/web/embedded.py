"""Status page of a lake, served by the process that runs its tasks."""

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Final

from penstock import persist
from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.supervisor import Supervisor
from penstock.supervisor.status import TaskStatus
from penstock.telemetry import logger
from penstock.web.http_server import AddressTaken, serve
from penstock.web.lake_view import LakeView

__all__ = ["NONE", "Page", "embedded_page"]

log = logger("web")

NONE: Final = "none"
TOKEN: Final = "PENSTOCK_HTTP_TOKEN"
"""Environment variable with the token that remote clients must send."""

SAMPLE_EVERY_MS: Final = 1_000
JOIN_S: Final = 2
PATIENCE_MS: Final = 5_000
"""Retry limit of the store: the page reports an unavailable store and does not wait for it."""


class Page:
    """URL of the page, and the supervisor whose status it shows."""

    def __init__(self) -> None:
        self.url = ""
        """Empty if no page is served."""

        self._supervisor: Supervisor | None = None

    def watch(self, supervisor: Supervisor) -> None:
        """Set the supervisor whose status the page shows."""
        self._supervisor = supervisor

    def status(self) -> Mapping[str, TaskStatus]:
        """Return the status of the running tasks, by name."""
        return {} if self._supervisor is None else self._supervisor.status()


@contextmanager
def embedded_page(
    location: str,
    address: str,
    *,
    served: Callable[[str], None] = lambda _: None,
    await_address: bool = False,
    clock: Clock = SYSTEM_CLOCK,
) -> Iterator[Page]:
    """Serve the page of a lake at `address` until the block ends; do nothing for `none`.

    `served` is called with its URL. With `await_address`, the page takes over an address of another
    process when that process ends; the block begins immediately.

    Raises:
        UsageError: the page cannot be served at `address`.
    """
    page = Page()
    if address == NONE:
        yield page
        return
    view = LakeView(location, persist.Settings(patience_ms=PATIENCE_MS), running=page.status)
    over = threading.Event()
    stack = ExitStack()

    def open_page() -> bool:
        try:
            opened = stack.enter_context(serve(view, address, token=os.environ.get(TOKEN)))
        except AddressTaken:
            if not await_address:
                raise
            return False
        page.url = opened.url
        served(opened.url)
        return True

    def sample(is_open: bool) -> None:
        while not clock.wait(over, SAMPLE_EVERY_MS):
            try:
                is_open = is_open or open_page()
                view.sample()
            except Exception:
                log.exception("could not sample the status")

    try:
        sampling = threading.Thread(
            target=sample, args=(open_page(),), name="page samples", daemon=True
        )
        sampling.start()
        try:
            yield page
        finally:
            over.set()
            sampling.join(JOIN_S)
    finally:
        stack.close()
        view.close()
