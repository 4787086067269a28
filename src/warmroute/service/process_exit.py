"""The end of the router's process: it comes within the shutdown deadline, whatever a thread or a C call is doing."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from math import ceil
from typing import Final

from warmroute._kernel import exit_after_signal, set_exit_deadline
from warmroute.config import Shutdown
from warmroute.event_log import EventLog

log = EventLog("warmroute.service")

EXIT_GRACE_S: Final = 10.0
"""Time after the shutdown deadline for everything else: error events, the journal, provisioners."""
THREADS_S: Final = 1.0
"""How long the process waits for threads that are still busy, for example with a prompt."""


def reconfigure_exit(shutdown: Shutdown) -> None:
    set_exit_deadline(ceil(shutdown.delay_s + shutdown.deadline_s + EXIT_GRACE_S))


def guard_exit(shutdown: Shutdown) -> None:
    """End the process some time after SIGTERM or SIGINT. To be called after their handlers are installed."""
    reconfigure_exit(shutdown)
    for number in (signal.SIGTERM, signal.SIGINT):
        exit_after_signal(number)


def leave() -> None:
    """End the process without waiting for busy threads. Python would wait until the last one has finished."""
    until_s = time.monotonic() + THREADS_S
    while busy := [
        thread.name
        for thread in threading.enumerate()
        if thread is not threading.main_thread() and not thread.daemon and thread.is_alive()
    ]:
        if time.monotonic() >= until_s:
            log.warning("threads_left", "The process ends without waiting for them.", threads=",".join(busy))
            logging.shutdown()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
        time.sleep(0.01)
