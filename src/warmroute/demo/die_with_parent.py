"""A warmroute command that ends with another process: `python -m warmroute.demo.die_with_parent PID LOG engine …` is
`warmroute engine …` until the process PID is gone, however it went.

What a demo or a test started must not outlive it, even where that is killed and can end nobody any more. It looks after
that itself, once it runs: a hook between fork and exec would do, too, but not in a parent with threads of others'
libraries (gRPC's wake up in the child, and find their files closed).

Standard error goes to LOG, unless that is `-`. Engines of the process provisioner outlive the router that started them,
as machines do, and the provisioner's log is gone with the engine: the last line of the demo's says with how many
requests under way it was told to end.
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
    _, other, log, *command = sys.argv
    Thread(target=_end_with, args=(int(other),), daemon=True).start()
    if log != "-":
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), sys.stderr.fileno())
    sys.argv[1:] = command
    runpy.run_module("warmroute.cli.main", run_name="__main__")
