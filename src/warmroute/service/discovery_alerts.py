"""Alerts about sources of nodes that fail or list nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from warmroute.discovery.discovery_service import DiscoveryService
from warmroute.telemetry.alerts import Alert

LASTING_S: Final = 30.0


def discovery_alerts(discovery: DiscoveryService) -> Iterator[Alert]:
    failing = [status for status in discovery.sources.values() if status.error]
    if failing:
        names = ", ".join(status.name for status in failing[:4])
        yield Alert(
            id="discovery_failing", severity="warning", after_s=LASTING_S,
            title=f"Discovery cannot read {names}",
            cause=f"{failing[0].name}: {failing[0].error[:300]}.",
            what_to_do="The router keeps the nodes that it knows, and new nodes do not join. Repair the source; "
            "GET /admin/discovery shows its state.",
        )  # fmt: skip
    empty = [status.name for status in discovery.sources.values() if status.empty]
    if empty:
        yield Alert(
            id="discovery_empty", severity="warning", after_s=LASTING_S,
            title=f"{', '.join(empty[:4])}: no nodes are listed any more",
            cause="The source answers, but lists no engine. The router keeps the nodes that it knew.",
            what_to_do="Check the file, the DNS name or the label selector. If the engines are gone on purpose, remove "
            "their nodes with DELETE /admin/nodes/NAME.",
        )  # fmt: skip
