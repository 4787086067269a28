"""What the router counts as it works: plain numbers, read out by telemetry.prometheus."""

from __future__ import annotations

from collections import Counter


class Counters:
    __slots__ = (
        "answered",
        "broken",
        "journal_dropped",
        "journal_written",
        "left",
        "loop_delay_max_s",
        "refused",
        "retries",
        "routed",
        "shed",
        "stale_connections",
        "threaded_prompts",
        "unread_prompts",
    )

    def __init__(self) -> None:
        self.answered: Counter[int] = Counter()
        """Answers of nodes that went to clients whole, by status."""
        self.refused: Counter[tuple[int, str]] = Counter()
        """Errors of the router's own, by status and code."""
        self.shed: Counter[tuple[str, int]] = Counter()
        """Of these, those that a node could have served, but not now: by reason and priority."""
        self.routed: Counter[str] = Counter()
        """Requests that a route was found for, by its name."""
        self.broken = 0
        """Answers that broke off after they had begun."""
        self.left = 0
        """Clients that went away before their answer was complete."""
        self.retries = 0
        """Times that a request went on to another node."""
        self.stale_connections = 0
        """Requests sent again since a kept-alive connection turned out closed."""
        self.threaded_prompts = 0
        """Prompts that were read in a thread."""
        self.unread_prompts = 0
        """Prompts that were not read: too many waited for a thread."""
        self.journal_written = 0
        """Decisions written to the journal's file."""
        self.journal_dropped = 0
        """Decisions that its disk did not take."""
        self.loop_delay_max_s = 0.0
        """Longest time that the event loop was late since the last scrape."""
