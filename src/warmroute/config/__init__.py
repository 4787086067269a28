"""The configuration: every key has a type, one default and a description.

The router reads it from one TOML file. An unknown key is an error that names the nearest known key.
`warmroute config-reference` generates docs/reference/configuration.md from this package.
"""

from warmroute.config.alerts import Alerts
from warmroute.config.clients import (
    Admin,
    KeyConfig,
    Limits,
    Listen,
    Log,
    Picker,
    Shutdown,
    Startup,
    State,
    canonical_address,
    is_loopback,
)
from warmroute.config.cluster import Cluster, RedisAddress, parse_redis_url
from warmroute.config.file import Config, check, describe_changes, from_table, keys_needing_restart, load, tables
from warmroute.config.nodes import (
    DEFAULT_ENGINE_PORT,
    DiscoveryConfig,
    Health,
    Hedging,
    IslandAffinity,
    IslandConfig,
    NodeConfig,
    OutlierDetection,
    Polling,
    Upstream,
    node_name,
)
from warmroute.config.prompts import ModelConfig, PromptDoctor, Prompts
from warmroute.config.records import Capture, Journal, Tracing
from warmroute.config.routing import Admission, Index, Pricing, PriorityName, RouteConfig, Routing
from warmroute.config.scaling import (
    LOW_QUEUE_PER_NODE,
    LOW_UTILISATION,
    Hours,
    IslandLimits,
    Objective,
    ProvisionerConfig,
    Scaling,
    ScalingReplay,
)
from warmroute.config.section import ConfigError, PolicyName, Section, describe_keys, missing_extra, parse_section

__all__ = [
    "DEFAULT_ENGINE_PORT",
    "LOW_QUEUE_PER_NODE",
    "LOW_UTILISATION",
    "Admin",
    "Admission",
    "Alerts",
    "Capture",
    "Cluster",
    "Config",
    "ConfigError",
    "DiscoveryConfig",
    "Health",
    "Hedging",
    "Hours",
    "Index",
    "IslandAffinity",
    "IslandConfig",
    "IslandLimits",
    "Journal",
    "KeyConfig",
    "Limits",
    "Listen",
    "Log",
    "ModelConfig",
    "NodeConfig",
    "Objective",
    "OutlierDetection",
    "Picker",
    "PolicyName",
    "Polling",
    "Pricing",
    "PriorityName",
    "PromptDoctor",
    "Prompts",
    "ProvisionerConfig",
    "RedisAddress",
    "RouteConfig",
    "Routing",
    "Scaling",
    "ScalingReplay",
    "Section",
    "Shutdown",
    "Startup",
    "State",
    "Tracing",
    "Upstream",
    "canonical_address",
    "check",
    "describe_changes",
    "describe_keys",
    "from_table",
    "is_loopback",
    "keys_needing_restart",
    "load",
    "missing_extra",
    "node_name",
    "parse_redis_url",
    "parse_section",
    "tables",
]
