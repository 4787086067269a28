"""The whole configuration: every value typed, with one default and a sentence that says what it does.

One TOML file holds it. Unknown keys are refused with the nearest known name, so that a typing error never turns into a
silent default. docs/configuration.md is made from these files (`warmroute config-reference`).
"""

from warmroute.config.islands import Crossing, IslandConfig
from warmroute.config.journal import Journal
from warmroute.config.nodes import Health, Metrics, NodeConfig, Upstream, node_name
from warmroute.config.prompts import ModelConfig, Prompts
from warmroute.config.provisioners import ProvisionerConfig
from warmroute.config.routes import RouteConfig
from warmroute.config.routing import Admission, Index, Pricing, Routing
from warmroute.config.scaling import Hours, IslandLimits, Scaling
from warmroute.config.section import ConfigError, PolicyName, PriorityName, Section, described, made_of, section_of
from warmroute.config.serving import Admin, KeyConfig, Limits, Listen, Log, Shutdown
from warmroute.config.whole import Config, check, from_table, is_loopback, load, needing_restart, tables

__all__ = [
    "Admin",
    "Admission",
    "Config",
    "ConfigError",
    "Crossing",
    "Health",
    "Hours",
    "Index",
    "IslandConfig",
    "IslandLimits",
    "Journal",
    "KeyConfig",
    "Limits",
    "Listen",
    "Log",
    "Metrics",
    "ModelConfig",
    "NodeConfig",
    "PolicyName",
    "Pricing",
    "PriorityName",
    "Prompts",
    "ProvisionerConfig",
    "RouteConfig",
    "Routing",
    "Scaling",
    "Section",
    "Shutdown",
    "Upstream",
    "check",
    "described",
    "from_table",
    "is_loopback",
    "load",
    "made_of",
    "needing_restart",
    "node_name",
    "section_of",
    "tables",
]
