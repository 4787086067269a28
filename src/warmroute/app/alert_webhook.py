"""Sends alerts that begin and end to a URL of the operator, in a thread of its own.

Whoever finds a change of an alert only appends it to a queue of bounded length. The thread sends what has come together
in one POST, and tries again a few times. If the receiver is slow, down or refuses, alerts are dropped and counted,
and the first failure of a row is in the log. `GET /admin/alerts` has them all.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from warmroute.app.alerts import SEVERITIES
from warmroute.config import Alerts
from warmroute.event_log import EventLog, where_it_failed
from warmroute.http_client import request

log = EventLog("warmroute.telemetry")

MAX_QUEUED: Final = 64
"""Changes that may wait. The oldest is dropped for a new one: the latest state matters."""
MAX_SENT: Final = 16
"""Changes in one POST."""
TIMEOUT_S: Final = 5.0
"""Time of one POST, from the connection to the response."""
PAUSES_S: Final = (1.0, 4.0, 15.0)
"""Pauses before the second, third and fourth attempt."""
BETWEEN_S: Final = 1.0
"""Time after a POST before the next one: an alert that comes and goes sends no more."""
CLOSE_TIMEOUT_S: Final = 2.0
"""How long the end of the process waits for the last alerts."""
CLOSE_CHECK_S: Final = 0.02
RESPONSE_BYTES: Final = 65_536
"""Nothing in a receiver's response matters but its status."""
MAX_TEXT: Final = 3000
"""Chat services cut longer messages."""

OUTCOMES: Final = ("sent", "failed", "dropped")

Json = dict[str, Any]


class AlertWebhook:
    def __init__(self, config: Alerts, secret: str) -> None:
        """`secret`: the value of the header; empty: the header is not sent."""
        self._url = config.webhook_url
        self._host = urlsplit(config.webhook_url).hostname or ""
        self._headers = ((config.webhook_header, secret),) if secret else ()
        self._severities = SEVERITIES[: SEVERITIES.index(config.webhook_severity) + 1]
        self._router = socket.gethostname()
        self.counts: Counter[str] = Counter()
        """Changes of alerts that were sent, that failed, or that were dropped because too many waited."""
        self._queue: deque[Json] = deque()
        self._wake, self._stopping = threading.Event(), threading.Event()
        self._failing = False
        self._thread = threading.Thread(target=self._run, name="warmroute-alerts", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def send(self, changed: Sequence[Json]) -> None:
        """Queue alerts that began or ended, as GET /admin/alerts describes them."""
        for alert in changed:
            if alert["severity"] not in self._severities:
                continue
            if len(self._queue) >= MAX_QUEUED:
                self._queue.popleft()
                self.counts["dropped"] += 1
            self._queue.append(alert)
            self._wake.set()

    async def close(self) -> None:
        """Send what waits, or drop it after CLOSE_TIMEOUT_S."""
        self._stopping.set()
        self._wake.set()
        for _ in range(round(CLOSE_TIMEOUT_S / CLOSE_CHECK_S)):
            if not self._thread.is_alive():
                return
            await asyncio.sleep(CLOSE_CHECK_S)

    # In the thread.

    def _run(self) -> None:
        while True:
            self._wake.wait()
            self._wake.clear()
            while self._queue:
                batch = [self._queue.popleft() for _ in range(min(MAX_SENT, len(self._queue)))]
                self._deliver(batch)
                self._stopping.wait(BETWEEN_S)
            if self._stopping.is_set():
                return

    def _deliver(self, batch: Sequence[Json]) -> None:
        body = msgspec.json.encode(message(batch, self._router))
        reason, may_retry = self._post(body)
        for pause_s in PAUSES_S:
            if not reason or not may_retry or self._stopping.wait(pause_s):
                break
            reason, may_retry = self._post(body)
        self.counts["failed" if reason else "sent"] += len(batch)
        if reason and not self._failing:
            self._failing = True
            log.warning(
                "alert_webhook_failed", "These alerts are not sent again. GET /admin/alerts lists all.",
                host=self._host, reason=reason, alerts=len(batch),
            )  # fmt: skip
        elif not reason and self._failing:
            self._failing = False
            log.info("alert_webhook_recovered", host=self._host, failed=self.counts["failed"])

    def _post(self, body: bytes) -> tuple[str, bool]:
        """Return why the receiver did not take the message, empty if it did; and whether another attempt may help."""
        try:
            status, _ = asyncio.run(
                request(
                    "POST", self._url, body, self._headers, timeout_s=TIMEOUT_S, limit_bytes=RESPONSE_BYTES
                )
            )  # fmt: skip
        except TimeoutError:
            return f"no answer within {TIMEOUT_S:g} s", True
        except OSError as error:
            return error.strerror or type(error).__name__, True
        except Exception as error:  # a bug must not end the thread
            return where_it_failed(error), False
        if 200 <= status < 300:
            return "", False
        return f"HTTP status {status}", status >= 500 or status in (408, 425, 429)


def create_webhook(config: Alerts) -> AlertWebhook | None:
    """Return None if no URL is configured."""
    if not config.webhook_url:
        return None
    secret = os.environ.get(config.webhook_secret_env, "")
    return AlertWebhook(config, secret if is_header_value(secret) else "")


def is_header_value(text: str) -> bool:
    """Return whether the text can be sent as a header: nothing in it begins another one."""
    return text.isascii() and text.isprintable()


def message(alerts: Sequence[Json], router: str) -> Json:
    """Return the JSON of one POST. Chat services show `text`."""
    lines = [
        f"[ended] {alert['title']}"
        if alert["ended"] is not None
        else f"[{alert['severity']}] {alert['title']}. {alert['cause']} {alert['what_to_do']}"
        for alert in alerts
    ]
    return {"text": "\n".join(lines)[:MAX_TEXT], "router": router, "sent": round(time.time()), "alerts": list(alerts)}
