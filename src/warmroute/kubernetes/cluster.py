"""Where a cluster's API server is, and how the router authenticates: a kubeconfig, or the Pod's service account."""

from __future__ import annotations

import os
from collections.abc import Container
from copy import copy

import httpx2
from lightkube import AsyncClient, KubeConfig
from lightkube.config import client_adapter
from lightkube.config.kubeconfig import SingleConfig
from lightkube.core.exceptions import ConfigError as KubeConfigError

from warmroute.config import ConfigError


def cluster_config(kubeconfig: str, context: str, plugin_variables: Container[str]) -> SingleConfig:
    """Empty values: the Pod's service account, or kubectl's default. `plugin_variables`: environment variables that a
    plugin for credentials may see. Raises ConfigError."""
    try:
        kube = KubeConfig.from_file(kubeconfig) if kubeconfig else KubeConfig.from_env()
        found = kube.get(context) if context else kube.get()
    except (KubeConfigError, OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(str(error)) from None
    if found is None:
        raise ConfigError("the kubeconfig has no current context")
    return _hide_secrets(found, plugin_variables)


def _hide_secrets(cluster: SingleConfig, allowed: Container[str]) -> SingleConfig:
    """Let the plugin that the kubeconfig names for credentials (`exec`) start without the router's secrets. lightkube
    gives it the router's whole environment, so `env` removes the rest."""
    if cluster.user is None or cluster.user.exec is None:
        return cluster
    user, plugin = copy(cluster.user), copy(cluster.user.exec)
    own = {variable.name for variable in plugin.env or ()}
    hidden = [f"--unset={name}" for name in sorted(os.environ) if name not in allowed and name not in own]
    plugin.command, plugin.args = "env", [*hidden, plugin.command, *(plugin.args or ())]
    user.exec = plugin
    return cluster._replace(user=user)


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
