"""What the log says of decisions: each that changes something, and what keeps nodes from coming, when that begins."""

from __future__ import annotations

import logging
from typing import Final

from warmroute.scaling.loop import Step, nodes_in_words

log = logging.getLogger("warmroute.scaling")

SAY_AGAIN_S: Final = 600.0
"""What kept nodes from coming, and has not for so long, is said again when it comes back."""


class Sayings:
    def __init__(self) -> None:
        self._doubts: tuple[str, ...] = ()
        """Those that were last said."""
        self._obstacles_s: dict[str, float] = {}
        """What keeps nodes from coming, and when that was last so."""

    def say(self, step: Step, now_s: float, *, asks: bool) -> None:
        """`asks`: whether there is anybody to ask for nodes; where not, it is nothing new that none come."""
        if step.changes or (step.doubts and step.doubts != self._doubts):
            self._doubts = step.doubts
            log.info(
                "%s%s, %d desired: %s",
                "dry run: " if step.dry_run else "",
                nodes_in_words(step.nodes),
                step.desired_nodes,
                "; ".join((*step.reasons, *step.doubts)) or "nothing to say",
            )
        said = {text: last_s for text, last_s in self._obstacles_s.items() if now_s - last_s <= SAY_AGAIN_S}
        new = [text for text in step.obstacles if text not in said]
        self._obstacles_s = said | dict.fromkeys(step.obstacles, now_s)
        if new and asks:
            lacking = f"{nodes_in_words(step.nodes)}, {step.desired_nodes} desired"
            why = [reason for reason in step.reasons if reason not in step.obstacles]
            log.warning("nodes lack that cannot come: %s (%s)", "; ".join(new), "; ".join((lacking, *why)))
