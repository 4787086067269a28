"""The process itself: its end in time, systemd, limits of memory and files, periodic tasks, event loop delay."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, MutableMapping
from contextlib import suppress
from math import ceil
from pathlib import Path
from typing import Any, Final

from warmroute._kernel import Histogram, exit_after_signal, set_exit_deadline
from warmroute.app.alert_webhook import AlertWebhook
from warmroute.app.alerts import ActiveAlerts, describe_alert
from warmroute.app.history import FINE_S, History
from warmroute.config import ConfigError, Shutdown
from warmroute.core.cache_view import CacheView
from warmroute.core.failed_tries import FailedTryLog
from warmroute.core.messages import DUE, Event
from warmroute.event_log import EventLog, where_it_failed
from warmroute.prompt.registry import TokenizerRegistry

# The end of the router's process: it comes within the shutdown deadline, whatever a thread or a C call is doing.

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


# The router as a systemd service: it takes over listening sockets, and reports ready, reloading, stopping and alive.
#
# Without systemd, the environment variables are missing and nothing happens. docs/guides/systemd.md describes the unit.

FIRST_FD: Final = 3
"""systemd passes its sockets from this file descriptor on (sd_listen_fds)."""
ADMIN_SOCKET: Final = "admin"
"""FileDescriptorName of the admin listener's socket. The other socket is that for clients."""


class Systemd:
    def __init__(self, environment: MutableMapping[str, str]) -> None:
        """Takes the variables out of the environment, so that child processes do not get them."""
        self._address = environment.pop("NOTIFY_SOCKET", "")
        watchdog_pid = environment.pop("WATCHDOG_PID", "")
        watchdog_us = environment.pop("WATCHDOG_USEC", "")
        is_ours = watchdog_pid in ("", str(os.getpid())) and watchdog_us.isdigit()
        self.watchdog_s = int(watchdog_us) / 1e6 if is_ours and self._address else 0.0
        """The process is restarted if it reports nothing for this time; 0: never."""
        pid, count = environment.pop("LISTEN_PID", ""), environment.pop("LISTEN_FDS", "")
        names = environment.pop("LISTEN_FDNAMES", "").split(":")
        self._inherited: dict[str, int] = {}
        if pid == str(os.getpid()) and count.isdigit():
            for number in range(int(count)):
                name = names[number] if number < len(names) else ""
                role = ADMIN_SOCKET if name == ADMIN_SOCKET else ""
                if role in self._inherited:
                    raise ConfigError(
                        "systemd passed more than one socket for the same listener: name the admin listener's "
                        f"FileDescriptorName={ADMIN_SOCKET}, and pass at most one other"
                    )
                self._inherited[role] = FIRST_FD + number

    def take_socket(self, name: str = "") -> socket.socket | None:
        """Return the listening socket that systemd passed; None if there is none. Raises ConfigError."""
        number = self._inherited.pop(name, None)
        if number is None:
            return None
        os.set_inheritable(number, False)
        try:
            found = socket.socket(fileno=number)
            listens = found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        except OSError as error:
            raise ConfigError(f"systemd passed file descriptor {number}, which is unusable: {error.strerror}") from None
        if not listens or found.type != socket.SOCK_STREAM:
            raise ConfigError(f"systemd passed file descriptor {number}, which is no listening stream socket")
        return found

    def notify(self, *states: str) -> None:
        """Tell systemd, if it wants to know. An error must not stop the router."""
        if not self._address:
            return
        address = f"\0{self._address[1:]}" if self._address.startswith("@") else self._address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as out:
                out.setblocking(False)
                out.sendto("\n".join(states).encode(), address)
        except OSError as error:
            log.warning("systemd_notify_failed", "systemd may restart the router.", reason=error.strerror or error)
            self._address = "" if self.watchdog_s == 0.0 else self._address

    def ready(self, status: str) -> None:
        self.notify("READY=1", f"STATUS={status}")

    def reloading(self) -> None:
        self.notify("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self) -> None:
        self.notify("STOPPING=1", "STATUS=Running requests finish")

    async def keep_alive(self) -> None:
        """Report from the event loop that it runs. If it hangs, systemd restarts the process."""
        while self.watchdog_s:
            self.notify("WATCHDOG=1")
            await asyncio.sleep(self.watchdog_s / 3)


# Work that the router does every few milliseconds, apart from requests, and the log of what fails there.

TICK_S = 0.05
"""The core looks at deadlines and the queue at least this often."""
MIN_TICK_S = 0.005
"""The core may ask for its next turn at once: no more often than this."""
WRITE_CALLS_S = 0.05
"""Captures, traces and the request log read ended calls this much later, so that a request does not wait for them."""
FAILED_TRIES_S = 0.2
"""Delay of the log line about a failed try. By then the rest of the error's body has arrived."""
CLEAN_UP_S = 0.25
ALERTS_S = 2.0
COLLECT_S = 60.0
"""Shortest time between two full garbage collections."""
MAX_COLLECT_SHARE = 0.0002
"""Share of the time that full garbage collections may take: with a thousand nodes, one takes some 70 ms, and the next
one comes after six minutes."""


def log_loop_error(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log an exception that nothing caught, without its message, which may contain a user's text."""
    error = context.get("exception")
    reason = where_it_failed(error) if isinstance(error, BaseException) else str(context.get("message", ""))
    log.error("event_loop_error", "The router continues.", reason=reason)


def log_unraisable(failed: sys.UnraisableHookArgs) -> None:
    """Log an exception in a callback of the kernel, which closes the connection that it came from."""
    if failed.exc_value is not None:
        log.error("event_loop_error", "The router continues.", reason=where_it_failed(failed.exc_value))


async def run_garbage_collection() -> None:
    """Free what refers to itself: connections, subscriptions and caches of nodes that left. Requests free themselves,
    so Python's own collections come too rarely: they count allocated objects. What existed at the start is not searched
    (`gc.freeze`), so one takes some milliseconds with a few dozen nodes."""
    pause_s = COLLECT_S
    while True:
        await asyncio.sleep(pause_s)
        began_s = time.thread_time()
        gc.collect()
        pause_s = max(COLLECT_S, (time.thread_time() - began_s) / MAX_COLLECT_SHARE)


async def run_brain(tell: Callable[[Event], object], next_due_s: Callable[[], float]) -> None:
    """Tell the brain that time passes: calls that wait get nodes that have room by a poll, or because they are new;
    what is late ends, and what is overdue is sent to another node."""
    while True:
        await asyncio.sleep(min(TICK_S, max(MIN_TICK_S, next_due_s() - time.monotonic())))
        try:
            tell(DUE)
        except Exception:
            log.exception("admission_tick_failed", "The router tries again.")


async def run_ended_calls(write: Callable[[], object], failed_tries: FailedTryLog) -> None:
    """Write down calls that have ended, and log what failed at nodes."""
    log_s = 0.0
    while True:
        await asyncio.sleep(WRITE_CALLS_S)
        try:
            write()
            now_s = time.monotonic()
            if now_s >= log_s:
                log_s = now_s + FAILED_TRIES_S
                failed_tries.write(now_s)
        except Exception:
            log.exception("clean_up_failed", "The router tries again.")


async def run_clean_up(cache_view: CacheView, tokenizer_registry: TokenizerRegistry) -> None:
    """Expire old entries of the cache index, verify tokenizers, and log nodes whose KV events are unusable."""
    token_mismatch: set[str] = set()
    missing_events: set[str] = set()
    while True:
        await asyncio.sleep(CLEAN_UP_S)
        try:
            cache_view.tidy(time.monotonic())
            before, missing_events = missing_events, {cache.name for cache in cache_view if cache.events_missing}
            for name in sorted(missing_events - before):
                log.warning(
                    "kv_events_missing",
                    "The node sends no KV events although it prefilled prompts. Until events arrive, the router infers "
                    "its cache from routed requests.",
                    node=name,
                )
            for cache in cache_view:
                if cache.token_mismatch and cache.name not in token_mismatch:
                    token_mismatch.add(cache.name)
                    log.warning(
                        "token_mismatch",
                        "The node's tokens differ from the router's. The router infers its cache from routed requests. "
                        "Set tokenizer and chat_template in [[models]] to those of the engine.",
                        node=cache.name,
                        model=cache.model,
                    )
            await tokenizer_registry.verify_samples()
        except Exception:
            log.exception("clean_up_failed", "The router tries again.")


async def run_history(history: History, alerts: ActiveAlerts, webhook: AlertWebhook | None) -> None:
    """Keep the history of the live page, look for problems, and tell the operator's webhook of them."""
    next_alerts_s = 0.0
    while True:
        now_s = time.monotonic()
        try:
            history.sample(now_s)
            if now_s >= next_alerts_s:
                next_alerts_s = now_s + ALERTS_S
                changed = alerts.update(now_s)
                if changed and webhook is not None:
                    wall_s = time.time() - now_s
                    webhook.send([describe_alert(alert, wall_s) for alert in changed])
        except Exception:
            log.exception("history_failed", "The router tries again.")
        await asyncio.sleep(FINE_S)


# Memory and file limits of the router's process.
#
# By default glibc returns the end of its heap to the system as soon as 128 KiB of it are free, and takes it again for
# the next large body, with a page fault for every 4 KiB of every prompt. Keeping some free memory saves these faults.

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
KEPT_BYTES: Final = 64 * 1024 * 1024
"""Free memory that the process keeps."""
MAPPED_BYTES: Final = 8 * 1024 * 1024
"""A larger body gets its own pages, which return to the system when it is freed."""


def keep_freed_memory() -> None:
    """Set glibc's limits. Does nothing with another C library."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)
    mallopt(_M_MMAP_THRESHOLD, MAPPED_BYTES)


def raise_file_limit() -> int:
    """Raise the limit of open files, and so of connections, as far as the system allows. Return the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
        except (ValueError, OSError):
            pass
    return soft


# What `ps` shows of a process.

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_NAME: Final = 15
_ARG_START: Final = 47
"""Of /proc/self/stat, counted from 0: where the arguments begin and end in memory."""


def show_as(title: str) -> None:
    """Let `ps` show this title instead of the command line. Python has copied its arguments, so they may go."""
    try:
        ctypes.CDLL(None).prctl(_PR_SET_NAME, title.encode()[:15], 0, 0, 0)
        # The second field may contain spaces and brackets.
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        start, end = int(fields[_ARG_START - 2]), int(fields[_ARG_START - 1])
        if 0 < start < end:
            size = end - start
            ctypes.memmove(start, title.encode()[: size - 1].ljust(size, b"\0"), size)
    except (OSError, ValueError, IndexError, AttributeError):  # another system than Linux
        pass


def go_on_without_parent() -> None:
    """Let the system send SIGCONT when the parent ends: a process that somebody has stopped then notices, and ends."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGCONT), 0, 0, 0)


# Measures the delay of the event loop: how late it runs a timer.

INTERVAL_S: Final = 0.1
WINDOW_S: Final = 60.0


class LoopDelay:
    def __init__(self) -> None:
        self.histogram = Histogram()
        self._max_s = 0.0
        self._max_before_s = 0.0
        """The longest delay of the last whole WINDOW_S."""
        self._window_ends_s = -1e9

    @property
    def max_s(self) -> float:
        """The longest delay of the last one to two WINDOW_S. Reading it does not reset it."""
        return max(self._max_s, self._max_before_s)

    def record(self, delay_s: float, now_s: float) -> None:
        self.histogram.observe(delay_s * 1000.0)
        if now_s >= self._window_ends_s:
            self._window_ends_s = now_s + WINDOW_S
            self._max_before_s, self._max_s = self._max_s, 0.0
        self._max_s = max(self._max_s, delay_s)

    async def run(self) -> None:
        while True:
            before_s = time.monotonic()
            await asyncio.sleep(INTERVAL_S)
            now_s = time.monotonic()
            self.record(now_s - before_s - INTERVAL_S, now_s)
