"""The provisioners, one file for each kind. What a kind needs beyond the core is an extra, imported only if that
kind is configured. _KINDS names the module of each kind: a new kind gets a row there.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from warmroute.config import ProvisionerConfig, missing_extra
from warmroute.scaling.provisioner import Provisioner

_KINDS = {
    "process": ("process", "ProcessProvisioner"),
    "kubernetes": ("kubernetes", "KubernetesProvisioner"),
    "ec2": ("ec2", "Ec2Provisioner"),
    "skypilot": ("skypilot", "SkyPilotProvisioner"),
    "command": ("command", "command_provisioner"),
    "webhook": ("command", "webhook_provisioner"),
}
"""Module of each kind, and what creates it there."""


def create_provisioner(config: ProvisionerConfig) -> Provisioner:
    """Return the provisioner for this configuration. Raises ConfigError, also if its extra is not installed."""
    file, name = _KINDS[config.kind]
    try:
        module = import_module(f"{__name__}.{file}")
    except ImportError as error:
        if (error.name or "").startswith("warmroute"):
            raise
        raise missing_extra(f"provisioners: kind {config.kind!r}", error, config.kind) from None
    create: Callable[[ProvisionerConfig], Provisioner] = getattr(module, name)
    return create(config)
