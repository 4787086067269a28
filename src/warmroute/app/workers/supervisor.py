"""The parent of `warmroute serve --workers N`: starts, watches and restarts the workers, passes them connections and
each other's state, reloads and drains them together, and serves the one admin listener.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from warmroute import build, build_advice
from warmroute.app.alert_webhook import AlertWebhook, ChangedAlerts, create_webhook
from warmroute.app.node_state import NodeState
from warmroute.app.process import ADMIN_SOCKET, ALERTS_S, EXIT_GRACE_S, Systemd
from warmroute.app.reload import log_rejected, watch_files
from warmroute.app.startup import url_host, warn_without_keys
from warmroute.app.workers.combined_admin import CombinedAdmin
from warmroute.app.workers.frames import GONE
from warmroute.app.workers.passed_connections import ConnectionPassing
from warmroute.app.workers.redis_link import new_origin
from warmroute.app.workers.replica_link import ReplicaLink
from warmroute.app.workers.worker_api import ask
from warmroute.app.workers.worker_process import SILENT_S, WorkerProcess
from warmroute.config import Config, ConfigError
from warmroute.edge.async_handler import AsyncHandler
from warmroute.edge.client_connection import Listener
from warmroute.edge.sockets import Server, listen_inherited, listen_tcp, open_tcp_socket, open_unix_socket, server_tls
from warmroute.edge.timer_wheel import TimerWheel
from warmroute.event_log import EventLog

log = EventLog("warmroute.service")

FIRST_PAUSE_S: Final = 0.1
MAX_PAUSE_S: Final = 15.0
"""Longest time between two starts of a worker that keeps ending."""
STEADY_S: Final = 30.0
"""A worker that served for this long is restarted without delay."""
CHECK_S: Final = 0.1
"""Time between two looks whether the workers still run."""
HUNG_S: Final = 2.0
"""A worker that has been silent for this long is in the log."""
STOP_SILENT_S: Final = 3.0
"""At the end, a worker that has been silent for this long is killed: it does not finish its requests either."""
CHANGES_S: Final = 1.0
"""How long a new worker may take to apply the changes of nodes, before it gets connections."""


class Supervisor:
    def __init__(
        self, read_config: Callable[[], Config], config_file: Path | None, workers: int, command: Sequence[str]
    ) -> None:
        """`command` starts a worker."""
        self._read_config = read_config
        self._config_file = config_file
        self.config = read_config()
        self._systemd = Systemd(os.environ)
        self._command = command
        self._count = workers
        self._folder = Path(tempfile.mkdtemp(prefix="warmroute-"))
        self._workers: dict[int, WorkerProcess] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = asyncio.Event()
        self._served = False
        """Whether any worker has ever served."""
        self._failed: int | None = None
        """Exit status of a worker that ended before any worker served."""
        self.restarts = 0
        self._missed_reload: set[int] = set()
        """Workers that hung during a reload."""
        self._timers = TimerWheel(time.monotonic)
        self.admin = CombinedAdmin(self, self.config.admin.token_sha256)
        self.admin.webhook = create_webhook(self.config.alerts)
        self._admin_listener = Listener(
            AsyncHandler(self.admin.answer, self.admin.check_head), self.config.limits, self._timers
        )
        self._passing: ConnectionPassing | None = None
        self._origin = new_origin()
        self._node_state = NodeState(self.config)
        self._replicas = ReplicaLink(
            self._origin, lambda: [worker for worker in self._workers.values() if worker.cluster_id], self._node_state
        )
        self.port = self.admin_port = 0

    # For the admin API.

    @property
    def serving(self) -> list[WorkerProcess]:
        """The workers that serve, also those that hang."""
        return [worker for _, worker in sorted(self._workers.items()) if worker.serves]

    @property
    def wanted(self) -> int:
        return self._count

    # Start.

    async def run_until_signal(self) -> int:
        """Serve until SIGTERM or SIGINT. Return the exit status."""
        loop = asyncio.get_running_loop()
        try:
            admin_server = await self._start()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self._stopping.set)
            loop.add_signal_handler(signal.SIGHUP, lambda: self._spawn(self._reload("SIGHUP")))
            await self._stopping.wait()
            if self._failed is None:
                await self._stop()
            if admin_server is not None:
                admin_server.close()
            self._admin_listener.abort_all()
        finally:
            await self._replicas.close()
            await self._node_state.close()
            if self.admin.webhook is not None:
                await self.admin.webhook.close()
            for worker in self._workers.values():
                worker.signal(signal.SIGKILL)
            for task in self._tasks:
                task.cancel()
            shutil.rmtree(self._folder, ignore_errors=True)
        return self._failed or 0

    async def _start(self) -> Server | None:
        """Raises ConfigError if an address cannot be used."""
        await self._node_state.load()  # the workers read it, too
        listen, admin = self.config.listen, self.config.admin
        scheme = "https" if server_tls(listen.tls_cert, listen.tls_key) is not None else "http"
        if (inherited := self._systemd.take_socket()) is not None:
            inherited.setblocking(False)
            sockets, name = [inherited], inherited.getsockname()
            self.port = name[1] if isinstance(name, tuple) else 0
            address = f"{scheme}://{url_host(name[0])}:{self.port}" if self.port else f"unix:{name}"
        elif listen.unix_socket:
            sockets, address = [open_unix_socket(listen.unix_socket)], f"unix:{listen.unix_socket}"
        else:
            sockets = [open_tcp_socket(listen.host, listen.port)]
            self.port = sockets[0].getsockname()[1]
            address = f"{scheme}://{url_host(listen.host)}:{self.port}"
        self._passing = ConnectionPassing(sockets, self._takers, inherited is not None)
        server = None
        if admin.enabled:
            inherited = self._systemd.take_socket(ADMIN_SOCKET)
            if inherited is not None:
                server = await listen_inherited(self._admin_listener, inherited)
            else:
                server = await listen_tcp(self._admin_listener, admin.host, admin.port)
            name = server.sockets[0].getsockname()
            self.admin_port = name[1] if isinstance(name, tuple) else 0
        self._spawn(self._timers.run())
        self._spawn(self._systemd.keep_alive())
        self._replicas.start(self.config.cluster)
        self._spawn(self._replicas.run())
        self._spawn(self._watch_workers())
        if (webhook := self.admin.webhook) is not None:
            webhook.start()
            self._spawn(self._send_alerts(webhook))
        if (file := self._config_file) is not None:
            changed = lambda: self._spawn(self._reload(f"{file} changed"))  # noqa: E731
            self._spawn(watch_files(lambda: [file], changed))
        for number in range(self._count):
            self._spawn(self._keep_running(number))
        self._passing.start()
        admin_address = f"http://{url_host(admin.host)}:{self.admin_port}" if admin.enabled else "off"
        log.info(
            "service_started", build_advice(),
            address=address, admin=admin_address, nodes=len(self.config.nodes),
            policy=self.config.routing.policy, build=build(), workers=self._count,
        )  # fmt: skip
        warn_without_keys(self.config, address)
        return server

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks = [task for task in self._tasks if not task.done()]
        self._tasks.append(asyncio.get_running_loop().create_task(work))

    async def _keep_running(self, number: int) -> None:
        """Start a worker, and start it again whenever it ends."""
        pause_s = FIRST_PAUSE_S
        while not self._stopping.is_set():
            worker = self._workers[number] = WorkerProcess(
                number, self._folder, self._origin, self._ready, self._replicas.pass_on
            )
            status = await self._run(worker)
            if worker.cluster_id:
                self._tell_others(worker, GONE, worker.cluster_id)
                self._replicas.ended(worker)
            if self._passing is not None:
                self._passing.give_again(worker.take_unconfirmed())
            if self._stopping.is_set():
                return
            if not self._served:
                self._failed = status if status > 0 else 1
                self._stopping.set()
                return
            self.restarts += 1
            served_s = time.monotonic() - worker.started_s
            pause_s = FIRST_PAUSE_S if served_s > STEADY_S else min(MAX_PAUSE_S, 2.0 * pause_s)
            log.error(
                "worker_ended", "Its connections are lost. The parent starts it again.", worker=number, status=status,
                served_s=round(served_s, 1), pause_s=pause_s,
            )  # fmt: skip
            await asyncio.sleep(pause_s)

    async def _run(self, worker: WorkerProcess) -> int:
        """Run a worker until it ends. Return its exit status."""
        try:
            await worker.start(self._command)
        except OSError as error:  # the system has no memory, processes or file descriptors left
            log.error("worker_not_started", "The parent tries again.", worker=worker.number, reason=error)
            worker.ended.set()
            return 1
        if self._stopping.is_set():
            worker.signal(signal.SIGTERM)
        return await worker.wait()

    def _ready(self, worker: WorkerProcess) -> None:
        self._served = True
        self._spawn(self._admit(worker))

    async def _admit(self, worker: WorkerProcess) -> None:
        """Bring a new worker up to date, and pass it connections."""
        self._replicas.joined(worker)
        with suppress(TimeoutError):
            async with asyncio.timeout(CHANGES_S):
                await worker.knows_changes.wait()
        worker.serves = True
        log.info("worker_ready", worker=worker.number, pid=worker.pid)
        self._report_ready()

    def _report_ready(self) -> None:
        self._systemd.ready(f"{len(self.serving)} of {self._count} workers serve")

    # While it runs.

    def _takers(self) -> list[WorkerProcess]:
        return [worker for worker in self._workers.values() if worker.answers]

    async def _watch_workers(self) -> None:
        """Notice workers that hang. The time counts in turns of this loop, so that a parent that was held up itself
        does not take its workers for hung."""
        hung: set[WorkerProcess] = set()
        while True:
            await asyncio.sleep(CHECK_S)
            for worker in self._workers.values():
                worker.check_silence(CHECK_S)
                if worker.silent_s < SILENT_S and worker in hung:
                    hung.discard(worker)
                    log.info("worker_answers", "It gets connections again.", worker=worker.number)
                elif worker.serves and worker.silent_s >= HUNG_S and worker not in hung:
                    hung.add(worker)
                    log.error(
                        "worker_hung", "Its connections wait. It gets no others, and the admin API answers without it.",
                        worker=worker.number, pid=worker.pid, silent_s=worker.silent_s,
                    )  # fmt: skip
                if worker.answers and worker.number in self._missed_reload:
                    self._missed_reload.discard(worker.number)
                    self._spawn(self._reload_late(worker))
                if self._stopping.is_set() and worker.silent_s >= STOP_SILENT_S:
                    log.error(
                        "worker_killed", "It does not answer, so it cannot finish its requests.", worker=worker.number,
                        silent_s=worker.silent_s,
                    )  # fmt: skip
                    worker.signal(signal.SIGKILL)
            hung &= set(self._workers.values())

    async def _send_alerts(self, webhook: AlertWebhook) -> None:
        """Tell the operator's webhook of the alerts of all workers, each alert once."""
        changes = ChangedAlerts()
        while True:
            await asyncio.sleep(ALERTS_S)
            try:
                alerts, complete = await self.admin.alerts()
                webhook.send(changes.update(alerts, complete, time.time()))
            except Exception:
                log.exception("history_failed", "The router tries again.")

    def _tell_others(self, sender: WorkerProcess, kind: bytes, payload: bytes) -> None:
        for worker in self._workers.values():
            if worker is not sender and worker.cluster_id:
                worker.link.send_frame(kind, payload)

    async def _reload(self, reason: str) -> None:
        await self.reload(reason)

    async def reload(self, reason: str) -> tuple[int, bytes]:
        """Reload the configuration of all workers. Return the status and body of the admin API's answer."""
        log.info("reload_requested", reason=reason)
        self._systemd.reloading()
        try:
            self.config = self._read_config()
        except ConfigError as error:
            log_rejected(error)
        else:
            self._admin_listener.limits = self.config.limits
            self._admin_listener.unread.limit = self.config.limits.unread_bytes
        try:
            status, body, missing = await self.admin.reload_workers()
        finally:
            self._report_ready()
        self._missed_reload.update(missing)
        return status, body

    async def _reload_late(self, worker: WorkerProcess) -> None:
        """Reload the configuration of a worker that hung when the others did."""
        if await ask(worker, "POST", "/admin/reload") is None:
            self._missed_reload.add(worker.number)

    # Stop.

    async def _stop(self) -> None:
        """Let the workers finish their requests, and end. A second signal makes them cut off running requests."""
        loop, shutdown = asyncio.get_running_loop(), self.config.shutdown
        self._systemd.stopping()
        log.info("service_stopping", "Running requests finish first.", deadline_s=shutdown.deadline_s)
        assert self._passing is not None
        hurry = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, hurry.set)
        self._signal_all(signal.SIGTERM)
        self._spawn(self._stop_accepting(shutdown.delay_s))
        running = loop.create_task(self._until_all_ended())
        try:
            async with asyncio.timeout(shutdown.delay_s + shutdown.deadline_s + EXIT_GRACE_S):
                hurried = loop.create_task(hurry.wait())
                await asyncio.wait((running, hurried), return_when=asyncio.FIRST_COMPLETED)
                if hurry.is_set():
                    self._passing.close()
                    self._pass_no_more()
                    self._signal_all(signal.SIGTERM)
                await running
        except TimeoutError:
            log.error("workers_killed", "They did not end before the shutdown deadline.")
        self._passing.close()

    async def _stop_accepting(self, delay_s: float) -> None:
        """`delay_s`: until then, load balancers see that the router is not ready."""
        assert self._passing is not None
        await asyncio.sleep(delay_s)
        await self._passing.finish()
        self._pass_no_more()

    def _pass_no_more(self) -> None:
        for worker in self._workers.values():
            worker.pass_no_more()

    def _signal_all(self, number: signal.Signals) -> None:
        for worker in self._workers.values():
            worker.signal(number)

    async def _until_all_ended(self) -> None:
        await asyncio.gather(*(worker.ended.wait() for worker in self._workers.values()))
