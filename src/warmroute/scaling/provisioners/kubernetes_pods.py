"""Reads Pods and their nodes as the API server returns them: a machine's state, address, island, and whether the
cluster reclaims it.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from lightkube import operators

from warmroute.kubernetes.objects import Object, condition, labels_of, meta
from warmroute.scaling.provisioner import MachineState

TOKEN = "warmroute/token"
DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
LEADER_OF = "leaderworkerset.sigs.k8s.io/name"
WORKER_INDEX = "leaderworkerset.sigs.k8s.io/worker-index"
RECLAIM_TAINTS = (
    "aws-node-termination-handler/",
    "cloud.google.com/impending-node-termination",
    "karpenter.sh/disrupted",
    "karpenter.sh/disruption",
    "ToBeDeletedByClusterAutoscaler",
    "node.kubernetes.io/out-of-service",
)
"""Taints, or their prefixes, of a node that will be taken away soon."""


def is_live(pod: Object) -> bool:
    """Return whether its controller counts it: it has neither ended nor been told to end."""
    return not meta(pod).get("deletionTimestamp") and (pod.get("status") or {}).get("phase") not in (
        "Succeeded",
        "Failed",
    )


def belongs_to(pod: Object, workload: Object, kind: str) -> bool:
    """Return whether the Pod belongs to this workload. A label selector may also match Pods of other workloads, except
    for a LeaderWorkerSet, whose Pods are labelled with its name. The name of a Deployment's ReplicaSet is the
    Deployment's name and the Pod's template hash."""
    if kind == "leaderworkerset":
        return True
    owner: Object = next((one for one in meta(pod).get("ownerReferences") or () if one.get("controller")), {})
    if kind == "statefulset":
        return bool(owner.get("uid") == meta(workload)["uid"])
    template_hash = labels_of(pod).get("pod-template-hash")
    return bool(owner.get("kind") == "ReplicaSet") and owner.get("name") == f"{meta(workload)['name']}-{template_hash}"


def is_starting(pod: Object) -> bool:
    """Return whether its controller would end it before any running Pod."""
    return not (pod.get("spec") or {}).get("nodeName") or (pod.get("status") or {}).get("phase") != "Running"


def state_of(pod: Object) -> MachineState:
    status = pod.get("status") or {}
    if meta(pod).get("deletionTimestamp"):
        return MachineState.TERMINATING
    if status.get("phase") in ("Succeeded", "Failed"):
        return MachineState.TERMINATED
    return MachineState.RUNNING if status.get("phase") == "Running" and status.get("podIP") else MachineState.PENDING


def url_of(pod: Object, port: int) -> str:
    address = (pod.get("status") or {}).get("podIP") or ""
    if not address:
        return ""
    return f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"


def created_s(one: Object) -> float:
    text = meta(one).get("creationTimestamp")
    return datetime.fromisoformat(str(text).replace("Z", "+00:00")).timestamp() if text else 0.0


def reason_of(pod: Object) -> str:
    """Return why it does not run, in the cluster's words."""
    scheduled = condition(pod, "PodScheduled")
    if scheduled.get("status") == "False":
        return str(scheduled.get("message") or scheduled.get("reason") or "it has no node yet")
    status = pod.get("status") or {}
    for container in status.get("containerStatuses") or ():
        waiting = (container.get("state") or {}).get("waiting")
        if waiting:
            return f"{waiting.get('reason', 'waiting')}: {waiting.get('message', '')}".rstrip(": ")
    return str(status.get("message") or status.get("reason") or "")


def reclaim_reason(pod: Object, node: Object | None) -> str:
    """Return why the cluster reclaims it, or an empty string."""
    disruption = condition(pod, "DisruptionTarget")
    if disruption.get("status") == "True":
        return str(disruption.get("message") or disruption.get("reason") or "it is being evicted")
    for taint in ((node or {}).get("spec") or {}).get("taints") or ():
        if str(taint.get("key", "")).startswith(RECLAIM_TAINTS):
            return f"its node has the taint {taint['key']}"
    return ""


def ordinal_of(pod: Object) -> int:
    number = str(meta(pod).get("name", "")).rpartition("-")[2]
    return int(number) if number.isdigit() else -1


def selector_of(workload: Object, kind: str) -> list[tuple[str, Any]]:
    """Return the label selector of its Pods in lightkube's form; of a LeaderWorkerSet, only the leaders."""
    if kind == "leaderworkerset":
        return [(LEADER_OF, meta(workload)["name"]), (WORKER_INDEX, "0")]
    selector = workload["spec"].get("selector") or {}
    wanted: list[tuple[str, Any]] = list((selector.get("matchLabels") or {}).items())
    for one in selector.get("matchExpressions") or ():
        values = one.get("values") or ()
        operator: Any = {
            "In": lambda values=values: operators.in_(values),
            "NotIn": lambda values=values: operators.not_in(values),
            "Exists": operators.exists,
            "DoesNotExist": operators.not_exists,
        }[one["operator"]]
        wanted.append((one["key"], operator()))
    return wanted
