"""An engine that ends with the demo: `python -m warmroute.sim.demo.tied PID LOG engine …` is `warmroute engine …`.

Engines of the process provisioner outlive the router that started them, as machines do. Those of a demo must not
outlive the demo, even where that is killed and can end nobody any more. The engine's log goes to a file of the demo's,
since the provisioner's is gone with the engine: its last line says with how many requests under way it was told to end.
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
    _, demo, log, *command = sys.argv
    Thread(target=_end_with, args=(int(demo),), daemon=True).start()
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), sys.stderr.fileno())
    sys.argv[1:] = command
    runpy.run_module("warmroute.cli.main", run_name="__main__")
