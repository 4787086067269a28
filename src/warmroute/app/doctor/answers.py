"""What a node answers: its engine, models, metrics and KV event endpoints, read by the router's own parsers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from warmroute.config import NodeConfig, node_name
from warmroute.doctor.node_http import Answer, NodeHttp
from warmroute.engines.engine_detection import detect_engine, engine_of_cards, metrics_paths, parse_load
from warmroute.engines.kv_endpoints import KvEndpoint, configured_endpoints, parse_event_sources, parse_server_info
from warmroute.engines.load_report import LoadReport, labels
from warmroute.engines.served_models import read_cards
from warmroute.fleet.reported_values import ReportedValues, decode_json

_OWNERS = {"vllm": "vllm", "sglang": "sglang", "tensorrt_llm": "trtllm"}


@dataclass(slots=True)
class NodeFacts:
    config: NodeConfig
    health: Answer
    health_path: str = "/health"
    has_key: bool = False
    """Whether the environment has an API key for it."""
    metrics: Answer = field(default_factory=Answer)
    models: Answer = field(default_factory=Answer)
    cards: list[dict[str, Any]] = field(default_factory=list)
    engine: str = ""
    """`vllm`, `sglang`, `trtllm`; empty if it is unknown."""
    is_detected: bool = False
    """Whether the router would detect the engine, too."""
    version: str = ""
    is_simulated: bool = False
    """Whether it is `warmroute engine`."""
    load: LoadReport | None = None
    server_info: dict[str, Any] = field(default_factory=dict)
    endpoints: list[KvEndpoint] | None = None
    """Where it publishes KV events; None if it does not say."""
    block_size: int = 0
    prefix_caching: bool | None = None

    @property
    def name(self) -> str:
        return node_name(self.config)

    @property
    def refused(self) -> tuple[str, int]:
        """The first path that the node refuses, without a key or with a wrong one, and its status; 0 if none."""
        answers = {self.health_path: self.health, "/v1/models": self.models, "/metrics": self.metrics}
        return next(((path, one.status) for path, one in answers.items() if one.status in (401, 403)), ("", 0))

    @property
    def bases(self) -> list[dict[str, Any]]:
        """The cards of models that are not adapters."""
        return [card for card in self.cards if not card.get("parent")]

    @property
    def adapters(self) -> list[str]:
        return [card["id"] for card in self.cards if card.get("parent")]


async def ask_node(config: NodeConfig, http: NodeHttp, health_path: str) -> NodeFacts:
    facts = NodeFacts(config, await http.get(health_path), health_path, http.has_key)
    if facts.health.error:
        return facts
    reported = ReportedValues(facts.name)
    facts.models = await http.get("/v1/models")
    if facts.models.ok:
        try:
            facts.cards = read_cards(facts.models.body, reported)
        except ValueError:
            pass
    await _ask_metrics(facts, http)
    facts.version = await _version(facts, http)
    await _ask_kv_events(facts, http, reported)
    facts.prefix_caching = _prefix_caching(facts)
    return facts


async def _ask_metrics(facts: NodeFacts, http: NodeHttp) -> None:
    configured = facts.config.engine
    refused: Answer | None = None
    for path in metrics_paths(configured):
        facts.metrics = await http.get(path)
        refused = refused or (facts.metrics if facts.metrics.status in (401, 403) else None)
        if facts.metrics.ok and (configured != "auto" or detect_engine(facts.metrics.body)):
            break
    if refused is not None and not facts.metrics.ok:
        facts.metrics = refused
    page = facts.metrics.body if facts.metrics.ok else b""
    detected = configured if configured != "auto" else detect_engine(page) or engine_of_cards(facts.cards)
    facts.is_detected = bool(detected)
    owners = [_OWNERS.get(str(card.get("owned_by"))) for card in facts.bases]
    facts.engine = detected or next(filter(None, owners), "")
    try:
        if facts.metrics.ok and (configured != "auto" or detect_engine(page)):
            facts.load = parse_load(facts.engine, page)
    except ValueError:
        pass
    facts.block_size = facts.load.block_size if facts.load is not None else 0


async def _version(facts: NodeFacts, http: NodeHttp) -> str:
    if facts.engine == "sglang":
        answer = await http.get("/server_info")
        facts.server_info = _object(answer)
        return printable(facts.server_info.get("version"))
    found = _object(await http.get("/version"))
    facts.is_simulated = found.get("simulated_by") == "warmroute"
    return printable(found.get("version"))


async def _ask_kv_events(facts: NodeFacts, http: NodeHttp, reported: ReportedValues) -> None:
    """As engines/kv_client.py does."""
    config, host = facts.config, urlsplit(facts.config.url).hostname or ""
    if config.kv_events not in ("auto", "off"):
        facts.endpoints = configured_endpoints(config.kv_events, config.kv_replay, host)
        return
    if facts.engine == "trtllm":
        return
    try:
        answer = await http.get("/kv_event_sources")
        if answer.ok:
            facts.endpoints = parse_event_sources(answer.body, host, reported)
        if not facts.endpoints and facts.engine != "vllm":
            answer = await http.get("/server_info")
            if answer.ok:
                found = parse_server_info(answer.body, host, reported)
                facts.endpoints = found.endpoints
                facts.block_size = facts.block_size or found.block_size
    except ValueError:
        pass


def _prefix_caching(facts: NodeFacts) -> bool | None:
    """Return None if the engine does not say."""
    if facts.engine == "vllm":
        for config in labels(facts.metrics.body, b"vllm:cache_config_info"):
            value = config.get(b"enable_prefix_caching")
            return None if value is None else value == b"True"
    if "disable_radix_cache" in facts.server_info:
        return not facts.server_info["disable_radix_cache"]
    return None


def printable(value: object, length: int = 60) -> str:
    """Return a text of a node without characters that control a terminal."""
    return "".join(one if one.isprintable() else " " for one in str(value or "")[:length])


def _object(answer: Answer) -> dict[str, Any]:
    try:
        value = decode_json(answer.body) if answer.ok else None
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
