"""How a verb that runs on is told to end."""

import os
import signal
import threading

__all__ = ["stop_on_signals"]


def stop_on_signals(stop: threading.Event) -> None:
    """Set `stop` at SIGINT or SIGTERM, however many of them come.

    SUBTLE: not by the handlers. They run in the main thread alone, amid whatever it does, and
    would wait for a lock that is held there; and if it waits for a lock itself, and the system
    gave the signal to another thread, they do not run at all. Below them the interpreter
    writes a byte into a pipe at once, and a thread waits for that.
    """
    told, tell = os.pipe()
    os.set_blocking(tell, False)

    def wait() -> None:
        os.read(told, 1)
        stop.set()

    threading.Thread(target=wait, name="signals", daemon=True).start()
    signal.set_wakeup_fd(tell, warn_on_full_buffer=False)
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, lambda *_: None)
