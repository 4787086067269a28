"""The configuration: every key has a type, one default and a description.

The router reads it from one TOML file. An unknown key is an error that names the nearest known key.
`warmroute config-reference` generates docs/reference/configuration.md from this package.
"""

from warmroute.config.addresses import canonical_address, is_loopback
from warmroute.config.alert_settings import Alerts
from warmroute.config.capture_settings import Capture
from warmroute.config.changes import describe_changes
from warmroute.config.cluster_settings import Cluster, RedisAddress, parse_redis_url
from warmroute.config.config import Config, check, from_table, keys_needing_restart, load, tables
from warmroute.config.discovery_settings import DEFAULT_ENGINE_PORT, DiscoveryConfig
from warmroute.config.extras import missing_extra
from warmroute.config.island_settings import IslandAffinity, IslandConfig
from warmroute.config.journal_settings import Journal
from warmroute.config.node_settings import NodeConfig, node_name
from warmroute.config.picker_settings import Picker
from warmroute.config.priority import PriorityName
from warmroute.config.prompt_settings import ModelConfig, PromptDoctor, Prompts
from warmroute.config.provisioner_settings import ProvisionerConfig
from warmroute.config.route_settings import RouteConfig
from warmroute.config.routing_settings import Admission, Index, Pricing, Routing
from warmroute.config.scaling_settings import (
    LOW_QUEUE_PER_NODE,
    LOW_UTILISATION,
    Hours,
    IslandLimits,
    Objective,
    Scaling,
    ScalingReplay,
)
from warmroute.config.section import ConfigError, PolicyName, Section, describe_keys, parse_section
from warmroute.config.serving_settings import Admin, KeyConfig, Limits, Listen, Log, Shutdown, Startup, State
from warmroute.config.tracing_settings import Tracing
from warmroute.config.upstream_settings import Health, Hedging, OutlierDetection, Polling, Upstream

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
