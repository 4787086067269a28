"""Runs a warmroute command that ends when another process ends:

    python -m warmroute.lab.demo.die_with_parent PID LOG engine …

is `warmroute engine …` until the process PID ends, even if that is killed and cannot stop its children.

The command watches PID itself, in a thread. A hook between fork and exec would fail in a parent with threads of other
libraries: those of gRPC wake up in the child and find their files closed.

Standard error goes to LOG, unless LOG is `-`. Engines of the process provisioner outlive the router, and their own log
file is deleted with them. So the demo reads from LOG whether an engine had requests when it stopped.
"""

from __future__ import annotations

import os
import runpy
import select
import signal
import sys
from threading import Thread


def _end_with(pid: int) -> None:
    try:
        select.select([os.pidfd_open(pid)], [], [])
    except ProcessLookupError:
        pass
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    _, parent, log, *command = sys.argv
    Thread(target=_end_with, args=(int(parent),), daemon=True).start()
    if log != "-":
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), sys.stderr.fileno())
    sys.argv[1:] = command
    runpy.run_module("warmroute", run_name="__main__")
