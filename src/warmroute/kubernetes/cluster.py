"""Where a cluster's API server is, and how the router authenticates: a kubeconfig, or the Pod's service account."""

from __future__ import annotations

import httpx2
from lightkube import AsyncClient, KubeConfig
from lightkube.config import client_adapter
from lightkube.config.kubeconfig import SingleConfig
from lightkube.core.exceptions import ConfigError as KubeConfigError

from warmroute.config import ConfigError


def cluster_config(kubeconfig: str, context: str) -> SingleConfig:
    """Empty values: the Pod's service account, or kubectl's default. Raises ConfigError."""
    try:
        kube = KubeConfig.from_file(kubeconfig) if kubeconfig else KubeConfig.from_env()
        found = kube.get(context) if context else kube.get()
    except (KubeConfigError, OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(str(error)) from None
    if found is None:
        raise ConfigError("the kubeconfig has no current context")
    return found


def typed_client(cluster: SingleConfig, namespace: str, timeout_s: float) -> AsyncClient:
    """Return lightkube's client, which knows the kinds of objects. Raises ConfigError."""
    try:
        return AsyncClient(
            config=cluster, namespace=namespace or None, timeout=httpx2.Timeout(timeout_s), field_manager="warmroute",
            trust_env=False,
        )  # fmt: skip
    except (KubeConfigError, OSError) as error:
        raise ConfigError(str(error)) from None


def http_client(cluster: SingleConfig, timeout_s: float) -> httpx2.AsyncClient:
    """Return an HTTP client for the API server that authenticates each request. Raises ConfigError."""
    parameters = client_adapter.ConnectionParams(timeout=httpx2.Timeout(timeout_s), trust_env=False)
    try:
        return client_adapter.AsyncClient(cluster, parameters)
    except (KubeConfigError, OSError) as error:
        raise ConfigError(str(error)) from None
