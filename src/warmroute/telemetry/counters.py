"""Counters of the router. telemetry/prometheus.py exports them."""

from __future__ import annotations

from collections import Counter
from typing import Final

PROMPT_READINGS: Final = ("exact", "inexact", "text", "none")
"""How the router read a prompt: as the engine's tokens; as tokens of which the engine may not have all; as text
because there is no tokenizer, or it cannot render the request; or not at all."""

TRACE_DROPS: Final = ("queue_full", "export_failed", "shutdown")


class Counters:
    __slots__ = (
        "capture_dropped",
        "capture_written",
        "disconnects",
        "errors",
        "hedges",
        "hedges_won",
        "interrupted",
        "journal_dropped",
        "journal_written",
        "prompts",
        "prompts_in_threads",
        "prompts_not_tokenized",
        "rejected",
        "rejected_by_tenant",
        "responses",
        "retries",
        "route_requests",
        "split_requests",
        "stale_connections",
        "traces_dropped",
        "traces_exported",
        "traces_limited",
    )

    def __init__(self) -> None:
        self.responses: Counter[int] = Counter()
        """Complete responses of nodes, by status."""
        self.errors: Counter[tuple[int, str]] = Counter()
        """Error responses of the router itself, by status and code."""
        self.rejected: Counter[tuple[str, int]] = Counter()
        """Requests that admission rejected, by reason and priority. They are in `errors`, too."""
        self.rejected_by_tenant: Counter[tuple[str, int, str]] = Counter()
        """The same requests by tenant, priority and reason."""
        self.route_requests: Counter[str] = Counter()
        """Requests by route."""
        self.interrupted = 0
        """Responses that failed after their first byte."""
        self.disconnects = 0
        """Clients that disconnected before they had their whole response."""
        self.retries = 0
        """Attempts on another node after a failed one."""
        self.split_requests: Counter[str] = Counter()
        """Requests that one node prefilled for another one, by outcome."""
        self.hedges = 0
        """Requests sent to a second node because their first token was overdue."""
        self.hedges_won = 0
        """Of these, the ones that the second node answered."""
        self.stale_connections = 0
        """Requests sent again because the node had closed the kept-alive connection."""
        self.prompts: Counter[tuple[str, str]] = Counter()
        """Prompts by served model and reading (PROMPT_READINGS)."""
        self.prompts_in_threads = 0
        """Prompts that a thread tokenized."""
        self.prompts_not_tokenized = 0
        """Prompts that the router routed by load because too many prompts waited for a thread."""
        self.journal_written = 0
        """Decisions written to the journal file."""
        self.journal_dropped = 0
        """Decisions that could not be written to the journal file."""
        self.capture_written = 0
        """Requests written to captures, once for each capture."""
        self.capture_dropped = 0
        """Requests that could not be written to a capture."""
        self.traces_exported = 0
        """Traces that the collector took."""
        self.traces_dropped: Counter[str] = Counter()
        """Traces that the collector did not get, by reason (TRACE_DROPS)."""
        self.traces_limited = 0
        """Requests that were not traced although their client asked for it."""
