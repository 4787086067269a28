"""Alerts about the link to other replicas."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from warmroute.app.alerts import Alert
from warmroute.app.replicas.cluster_member import ClusterMember

LASTING_S: Final = 2.0


def cluster_alerts(member: ClusterMember | None, now_s: float) -> Iterator[Alert]:
    status = member.read_status() if member is not None else None
    if member is None or status is None:
        return
    if not status.connected:
        yield Alert(
            id="cluster_disconnected", severity="warning", after_s=LASTING_S,
            title="This replica does not hear the others",
            cause=f"Redis at {status.address}: {status.reason or 'no reply'}, for {now_s - status.changed_s:.0f} s.",
            what_to_do="Requests go on. This replica knows the load of nodes only from its own requests and the nodes' "
            "metrics, uses its share of the rate limits, and does not scale. Repair Redis or the network; the replica "
            "connects by itself.",
        )  # fmt: skip
    elif not status.writable:
        yield Alert(
            id="cluster_not_writable", severity="warning", after_s=LASTING_S,
            title="Redis takes no writes",
            cause=f"Redis at {status.address}: {status.reason or 'no reply'}.",
            what_to_do="Replicas still hear each other. No replica scales, and changes of nodes are lost if all "
            "replicas end. Check maxmemory, the disk, and whether the server is a read-only replica.",
        )  # fmt: skip
