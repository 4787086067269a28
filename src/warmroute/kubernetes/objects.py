"""Reads objects as the API server returns them: metadata, conditions, and where a Kubernetes node runs."""

from __future__ import annotations

from typing import Any

Object = dict[str, Any]

REGION = ("topology.kubernetes.io/region", "failure-domain.beta.kubernetes.io/region")
ZONE = ("topology.kubernetes.io/zone", "failure-domain.beta.kubernetes.io/zone")


def meta(one: Object) -> Object:
    found: Object = one.get("metadata") or {}
    return found


def annotations_of(one: Object) -> dict[str, str]:
    return meta(one).get("annotations") or {}


def labels_of(one: Object) -> dict[str, str]:
    return meta(one).get("labels") or {}


def condition(one: Object, kind: str) -> Object:
    for found in (one.get("status") or {}).get("conditions") or ():
        if found.get("type") == kind:
            result: Object = found
            return result
    return {}


def first_label(labels: dict[str, str], keys: tuple[str, ...]) -> str:
    return next((str(labels[key]) for key in keys if labels.get(key)), "")


def island_of(node: Object | None) -> str:
    """Return provider and region of a Kubernetes node by its labels; empty without them."""
    region = first_label(labels_of(node or {}), REGION)
    provider = str(((node or {}).get("spec") or {}).get("providerID") or "").partition(":")[0]
    return f"{provider or 'kubernetes'}/{region}" if region else ""
