"""Times of the timeline, and updates.

All values are plain: this package reads no clock and does no I/O.

    time     bounds of times; text of times
    update   Update: (data, time, diff)
"""

from penstock.progress.time import MAX_TIME, MIN_TIME, check_time
from penstock.progress.update import MAX_DIFF, MIN_DIFF, Update

__all__ = ["MAX_DIFF", "MAX_TIME", "MIN_DIFF", "MIN_TIME", "Update", "check_time"]
