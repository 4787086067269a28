"""A real API server that knows the objects of KEDA and of the Prometheus operator."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.kubernetes_workload import Cluster
from support.real_kubernetes import RealCluster, missing

CUSTOM = (
    ("monitoring.coreos.com", "v1", "ServiceMonitor"), ("monitoring.coreos.com", "v1", "PrometheusRule"),
    ("keda.sh", "v1alpha1", "ScaledObject"), ("keda.sh", "v1alpha1", "TriggerAuthentication"),
)  # fmt: skip


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    assert not missing(), f"{', '.join(missing())} missing. `make test-real-kubernetes` builds them."
    created = RealCluster(tmp_path_factory.mktemp("cluster"))
    for group, version, kind in CUSTOM:
        schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
        names = {"kind": kind, "plural": f"{kind.lower()}s", "singular": kind.lower(), "listKind": f"{kind}List"}
        versions = [{"name": version, "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}]
        definition = {
            "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
            "metadata": {"name": f"{kind.lower()}s.{group}"},
            "spec": {"group": group, "scope": "Namespaced", "names": names, "versions": versions},
        }  # fmt: skip
        created.request("POST", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", definition)
    yield created
    created.close()
