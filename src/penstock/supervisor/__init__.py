"""Supervisor of sources and materializations: one thread for each task.

Only the supervisor restarts tasks. The loops of sources and materializations raise.
"""

from penstock.supervisor.status import Kind
from penstock.supervisor.supervised_task import run_loop
from penstock.supervisor.supervisor import Supervisor
from penstock.supervisor.task import Loop, Task, error_fields, writer_id

__all__ = ["Kind", "Loop", "Supervisor", "Task", "error_fields", "run_loop", "writer_id"]
