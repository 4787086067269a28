"""Turns Pods and EndpointSlices into targets.

A label or annotation `warmroute/model`, `warmroute/role`, `warmroute/gpu`, `warmroute/engine`, `warmroute/island` or
`warmroute/usd-per-hour` sets that property of the node. An annotation overrides a label.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from warmroute.config import DiscoveryConfig
from warmroute.discovery.target import LABELS, Target, create_target
from warmroute.kubernetes.objects import (
    REGION,
    ZONE,
    Object,
    annotations_of,
    condition,
    first_label,
    island_of,
    labels_of,
    meta,
)

Nodes = Mapping[str, Object]
"""Kubernetes nodes by name."""
PREFIX: Final = "warmroute/"
GPU_PRODUCT: Final = "nvidia.com/gpu.product"
"""Label of a Kubernetes node, from NVIDIA's GPU feature discovery."""


def key_of(one: Object) -> str:
    return str(meta(one).get("uid") or meta(one).get("name"))


def node_names(one: Object) -> list[str]:
    """Return the Kubernetes nodes that a Pod or the endpoints of a slice run on."""
    if "endpoints" in one:
        return [name for endpoint in one["endpoints"] or () if (name := _endpoint_node(endpoint))]
    own = (one.get("spec") or {}).get("nodeName")
    return [str(own)] if own else []


def pod_targets(config: DiscoveryConfig, pod: Object, nodes: Nodes, invalid: list[str]) -> Iterator[Target]:
    """Yield the Pod's target; none before it has an address, or after it has ended."""
    status = pod.get("status") or {}
    host = str(status.get("podIP") or "")
    if not host or status.get("phase") in ("Succeeded", "Failed"):
        return
    ready = condition(pod, "Ready").get("status") == "True" and not meta(pod).get("deletionTimestamp")
    node = nodes.get(str((pod.get("spec") or {}).get("nodeName") or ""))
    labels = _settings(pod, node, first_label(labels_of(pod), REGION), first_label(labels_of(pod), ZONE))
    port = config.port or _container_port(pod, config.port_name)
    target = create_target(config, host, port, labels, invalid, name=str(meta(pod).get("name") or ""), ready=ready)
    if target is not None:
        yield target


def slice_targets(config: DiscoveryConfig, one: Object, nodes: Nodes, invalid: list[str]) -> Iterator[Target]:
    """Yield a target for each endpoint of an EndpointSlice."""
    port = config.port or _slice_port(one, config.port_name)
    for endpoint in one.get("endpoints") or ():
        addresses = endpoint.get("addresses") or ()
        state = endpoint.get("conditions") or {}
        ready = state.get("ready") is not False and not state.get("terminating")
        zone = endpoint.get("zone") or first_label(endpoint.get("topology") or {}, ZONE)
        labels = _settings(one, nodes.get(_endpoint_node(endpoint)), "", str(zone or ""))
        pod = endpoint.get("targetRef") or {}
        name = str(pod.get("name") or "") if pod.get("kind") == "Pod" else ""
        if not addresses:
            continue
        target = create_target(config, str(addresses[0]), port, labels, invalid, name=name, ready=ready)
        if target is not None:
            yield target


def _endpoint_node(endpoint: Object) -> str:
    return str(endpoint.get("nodeName") or (endpoint.get("topology") or {}).get("kubernetes.io/hostname") or "")


def _settings(one: Object, node: Object | None, region: str, zone: str) -> dict[str, Any]:
    """Return the labels of a target. The island is the region of its Kubernetes node. Without the right to read nodes,
    it is the zone."""
    island = island_of(node) or (f"kubernetes/{region}" if region else f"kubernetes/{zone}" if zone else "")
    gpu = str(labels_of(node or {}).get(GPU_PRODUCT) or "").removeprefix("NVIDIA-")
    found: dict[str, Any] = {"island": island, "gpu": gpu}
    for values in (labels_of(one), annotations_of(one)):
        for key in LABELS:
            value = values.get(PREFIX + key.replace("_", "-"))
            if value:
                found[key] = value
    return found


def _container_port(pod: Object, name: str) -> int:
    """Return the named port, or the only one; 0 if it is unknown."""
    containers = (pod.get("spec") or {}).get("containers") or ()
    return _pick([port for one in containers for port in one.get("ports") or ()], "containerPort", name)


def _slice_port(one: Object, name: str) -> int:
    return _pick(one.get("ports") or (), "port", name)


def _pick(ports: Any, key: str, name: str) -> int:
    numbers = [port.get(key) for port in ports if not name or port.get("name") == name]
    found = {number for number in numbers if isinstance(number, int) and 0 < number < 65536}
    return found.pop() if len(found) == 1 else 0
