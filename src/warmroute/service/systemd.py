"""The router as a systemd service: it takes over listening sockets, and reports ready, reloading, stopping and alive.

Without systemd, the environment variables are missing and nothing happens. docs/guides/systemd.md describes the unit.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import MutableMapping
from typing import Final

from warmroute.config import ConfigError
from warmroute.event_log import EventLog

log = EventLog("warmroute.service")

FIRST_FD: Final = 3
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
