"""Where nodes come from: one small file for each kind of cloud. What a kind needs beyond the core is an extra, and is
imported only when that kind is configured.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from warmroute.config import ConfigError, ProvisionerConfig
from warmroute.scaling.provisioner import Provisioner

_KINDS = {
    "process": ("process", "ProcessProvisioner"),
    "kubernetes": ("kubernetes", "KubernetesProvisioner"),
    "ec2": ("ec2", "Ec2Provisioner"),
    "skypilot": ("skypilot", "SkyPilotProvisioner"),
    "command": ("command", "CommandProvisioner"),
    "webhook": ("webhook", "WebhookProvisioner"),
}


def provisioner_named(config: ProvisionerConfig) -> Provisioner:
    """The one that this table asks for. Raises ConfigError, also where its extra is not installed."""
    module, name = _KINDS[config.kind]
    try:
        kind = import_module(f"{__name__}.{module}")
    except ImportError as error:
        if (error.name or "").startswith("warmroute"):
            raise
        raise ConfigError(
            f"provisioners: kind {config.kind!r} needs {error.name}, which is not installed: "
            f"install warmroute[{config.kind}]"
        ) from None
    make: Callable[[ProvisionerConfig], Provisioner] = getattr(kind, name)
    return make(config)
