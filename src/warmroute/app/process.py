"""Work that the router does every few milliseconds, apart from requests, and the log of what fails there."""

from __future__ import annotations

import asyncio
import gc
import sys
import time
from typing import Any

from warmroute.event_log import EventLog, where_it_failed
from warmroute.fleet.fleet import Fleet
from warmroute.index.cache_view import CacheView
from warmroute.prompt.tokenizer_registry import TokenizerRegistry
from warmroute.routing.admission import TICK_S, Admission
from warmroute.routing.dispatcher import Dispatcher
from warmroute.routing.hedging import CHECK_S
from warmroute.telemetry.alert_webhook import AlertWebhook
from warmroute.telemetry.alerts import Alerts, describe_alert
from warmroute.telemetry.history import FINE_S, History

log = EventLog("warmroute.service")
CLEAN_UP_S = 0.25
ALERTS_S = 2.0
COLLECT_S = 60.0
MAX_COLLECT_SHARE = 0.0002
"""Of the time: with a thousand nodes, a collection takes some 70 ms, and the next one comes after six minutes."""


def log_loop_error(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """An exception that nothing caught. Its message may contain a user's text."""
    error = context.get("exception")
    reason = where_it_failed(error) if isinstance(error, BaseException) else str(context.get("message", ""))
    log.error("event_loop_error", "The router continues.", reason=reason)


def log_unraisable(failed: sys.UnraisableHookArgs) -> None:
    """An exception in a callback of the kernel, which closes the connection that it came from."""
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


async def run_admission(admission: Admission, dispatcher: Dispatcher, fleet: Fleet) -> None:
    """Send waiting requests to nodes that got room without an event: after a poll, or because they are new. End what
    is late."""
    while True:
        await asyncio.sleep(TICK_S)
        try:
            admission.tick(list(fleet), time.monotonic())
            dispatcher.deadlines.check(time.monotonic())
        except Exception:
            log.exception("admission_tick_failed", "The router tries again.")


async def run_hedging(dispatcher: Dispatcher) -> None:
    """Send requests that are overdue, or whose node went down, to other nodes. Log what failed at nodes."""
    while True:
        await asyncio.sleep(CHECK_S)
        try:
            dispatcher.tick(time.monotonic())
            dispatcher.failed_tries.write(time.monotonic())
        except Exception:
            log.exception("hedging_failed", "The router tries again.")


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


async def run_history(history: History, alerts: Alerts, webhook: AlertWebhook | None) -> None:
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
