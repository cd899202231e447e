"""How a verb that runs on is told to end."""

import os
import signal
import threading

__all__ = ["stop_on_signals"]


def stop_on_signals(stop: threading.Event) -> None:
    """Set `stop` at SIGINT or SIGTERM, however many of them come.

    SUBTLE: not by the handler itself. It runs amid whatever the main thread does, be that
    the handler or a look at `stop`, and would wait for a lock that is held there. A byte
    in a pipe needs no lock, and another thread waits for it.
    """
    told, tell = os.pipe()
    os.set_blocking(tell, False)

    def wait() -> None:
        os.read(told, 1)
        stop.set()

    threading.Thread(target=wait, name="signals", daemon=True).start()
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, lambda *_: os.write(tell, b"!"))
