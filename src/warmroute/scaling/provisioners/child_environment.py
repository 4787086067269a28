"""The environment of the programs that provisioners run: a few harmless variables, and those that `pass_env` names.

The router's own environment contains its secrets: API keys of engines, tokens, other provisioners' credentials.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Final

from warmroute.config import ProvisionerConfig

COMMON: Final = ("PATH", "HOME", "USER", "LANG", "LC_*", "TZ", "TMPDIR")
OF_KIND: Final = {
    "kubernetes": ("KUBECONFIG", "KUBERNETES_*"),
    "process": ("LD_LIBRARY_PATH", "CUDA_*", "NVIDIA_*"),
    "skypilot": ("SKYPILOT_*",),
}
"""What the programs of a kind need to find their hardware or server."""


def child_environment(config: ProvisionerConfig, added: Mapping[str, str] = MappingProxyType({})) -> dict[str, str]:
    """Return the environment of a program. `added`: variables of the provisioner itself."""
    patterns = (*COMMON, *OF_KIND.get(config.kind, ()), *config.pass_env)
    found = {name: value for name, value in os.environ.items() if any(fnmatchcase(name, one) for one in patterns)}
    return {**found, **added}
