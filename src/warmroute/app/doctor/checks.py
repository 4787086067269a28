"""What a node's answers mean, and what to change."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from warmroute import build_advice, version_and_build
from warmroute.app.doctor.answers import NodeFacts, NodeHttp, SampleResult
from warmroute.app.models import missing_advice
from warmroute.config import Config, ConfigError
from warmroute.engines import ENGINE_LINE, engine_of
from warmroute.prompt.hub import find_tokenizer_files
from warmroute.prompt.node_tokenizer import Agreement, NodeDidNotAnswer, compare_tokens, tokenize_request
from warmroute.prompt.registry import TokenizerRegistry, TokenizerStatus

# The result of an examination: checks of the configuration, of each node, and of the fleet.

State = Literal["ok", "problem", "note"]
"""`note`: not a mistake by itself, or not checked."""


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    state: State
    found: str
    """What the doctor found, as a sentence without a full stop."""
    change: str = ""
    """The flag of the engine or the lines of the configuration to change. May have several lines."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A node, or another thing that was examined."""

    name: str
    checks: list[Check] = field(default_factory=list)
    url: str = ""

    @property
    def problems(self) -> int:
        return sum(check.state == "problem" for check in self.checks)


@dataclass(frozen=True, slots=True)
class Report:
    subjects: list[Subject]

    @property
    def problems(self) -> int:
        return sum(subject.problems for subject in self.subjects)

    def describe(self) -> dict[str, Any]:
        """Return the report for --json."""
        return {
            "warmroute": version_and_build(),
            "build_advice": build_advice() or None,
            "problems": self.problems,
            "subjects": [
                {
                    "name": subject.name,
                    "url": subject.url or None,
                    "checks": [
                        {"name": one.name, "state": one.state, "found": one.found, "change": one.change or None}
                        for one in subject.checks
                    ],
                }
                for subject in self.subjects
            ],
        }


# What a node's answers mean for the router, and what to change. No I/O.

MAX_CLOCK_SKEW_S = 2.0
"""The date of a response has whole seconds, and the way to the node takes some of one."""


def reachable(facts: NodeFacts, health_path: str) -> Check:
    health, url = facts.health, facts.config.url
    if health.error:
        return Check(
            "reachable", "problem", f"{url} does not answer: {health.error}",
            f"Start the engine, open its port to this machine, or correct url = \"{url}\" in [[nodes]]",
        )  # fmt: skip
    if health.status in (401, 403):
        return _refused("reachable", f"GET {health_path}", health.status, facts)
    if health.status >= 500:
        return Check("reachable", "problem", f"GET {health_path} answers {health.status}", "Wait until it has started")
    return Check("reachable", "ok", f"GET {health_path} answers {health.status}")


def _refused(name: str, what: str, status: int, facts: NodeFacts) -> Check:
    found, change = key_advice(facts)
    return Check(name, "problem", f"{what} answers {status}: {found}", change)


def _nodes_line(name: str, line: str) -> str:
    """Return a line to add to the [[nodes]] table of a node."""
    return f"In the [[nodes]] table of {name}, set\n    {line}"


def key_advice(facts: NodeFacts) -> tuple[str, str]:
    """Return why a node refuses requests, and what to change."""
    variable = facts.config.api_key_env
    if not variable:
        line = 'api_key_env = "NODE_API_KEY"  # an environment variable of the router'
        return "the node requires an API key", _nodes_line(facts.name, line)
    if not facts.has_key:
        change = f"Set the environment variable {variable}, also where the router runs"
        return f"the node requires an API key, and {variable} is not set", change
    return (
        f"the node refuses the API key in {variable}",
        f"Correct the value of {variable}, also where the router runs: it must be the key of the engine",
    )


def engine(facts: NodeFacts) -> Check:
    if facts.metrics.status in (401, 403) and facts.load is None:
        return _refused("engine", "its metrics page", facts.metrics.status, facts)
    name = engine_of(facts.engine).title
    shown = f"{name} {facts.version}".strip()
    if not facts.engine:
        return Check(
            "engine", "problem", "the engine is unknown: neither its metrics nor its models name it",
            _nodes_line(facts.name, ENGINE_LINE),
        )  # fmt: skip
    if facts.load is None:
        status = facts.metrics.error or f"answers {facts.metrics.status}" if not facts.metrics.ok else "has no load"
        change = engine_of(facts.engine).to_report_load
        if not facts.is_detected:
            change += ". " + _nodes_line(facts.name, f'engine = "{facts.engine}"')
        return Check("engine", "problem", f"{shown}, but its metrics page {status}", change)
    return Check("engine", "ok", shown)


def models(facts: NodeFacts) -> Check:
    if facts.bases:
        return Check("models", "ok", ", ".join(card["id"] for card in facts.bases))
    if facts.config.models:
        return Check("models", "ok", f"{', '.join(facts.config.models)} (from the configuration)")
    if facts.models.status in (401, 403):
        return _refused("models", "GET /v1/models", facts.models.status, facts)
    reason = facts.models.error or f"answers {facts.models.status}" if not facts.models.ok else "lists no models"
    return Check(
        "models", "problem", f"GET /v1/models {reason}", _nodes_line(facts.name, 'models = ["NAME"]'),
    )  # fmt: skip


def context_window(facts: NodeFacts) -> Check:
    configured = facts.config.max_model_len
    windows = {card["id"]: configured or card.get("max_model_len") for card in facts.bases}
    unknown = [name for name, window in windows.items() if not isinstance(window, int)]
    if unknown:
        return Check(
            "context window", "note", f"the engine does not report that of {', '.join(unknown)}",
            _nodes_line(facts.name, "max_model_len = 32768  # as the engine was started"),
        )  # fmt: skip
    return Check("context window", "ok", ", ".join(f"{window:,} tokens" for window in set(windows.values()) if window))


def clock(facts: NodeFacts) -> Check:
    skew_s = facts.health.clock_skew_s
    if skew_s is None:
        return Check("clock", "note", "not checked: the node's responses have no date")
    if abs(skew_s) > MAX_CLOCK_SKEW_S:
        direction = "ahead of" if skew_s > 0 else "behind"
        return Check(
            "clock", "problem", f"the node's clock is {abs(skew_s):,.0f} s {direction} this machine's",
            "Synchronize both clocks (NTP): KV events carry the time, and some chat templates print the date",
        )  # fmt: skip
    return Check("clock", "ok", f"within {MAX_CLOCK_SKEW_S:g} s of this machine's")


def lora(facts: NodeFacts) -> Check:
    names = facts.adapters
    if not names:
        return Check("LoRA", "ok", "no adapters")
    slots = facts.load.adapter_slots if facts.load is not None else 0
    shown = f"{len(names)} adapters, for example {names[0]}" if len(names) > 3 else ", ".join(names)
    if facts.engine == "sglang":
        return Check("LoRA", "note", f"{shown}. SGLang's KV events do not name the adapter of a block")
    if slots and len(names) > slots:
        return Check(
            "LoRA", "note", f"{shown}. The engine keeps {slots} of them loaded and swaps the others",
            f"Start vLLM with --max-loras {len(names)} if it has the memory",
        )  # fmt: skip
    return Check("LoRA", "ok", shown)


def prefix_caching(facts: NodeFacts) -> Check:
    if facts.prefix_caching is None:
        return Check("prefix caching", "note", "not checked: the engine does not report it")
    if facts.prefix_caching:
        return Check("prefix caching", "ok", "on")
    return Check(
        "prefix caching", "problem", "off: every prompt is prefilled again", engine_of(facts.engine).to_cache_prefixes
    )


def block_size(facts: NodeFacts) -> Check:
    if not facts.block_size:
        return Check("block size", "note", "the engine does not report it; the router learns it from KV events")
    if facts.block_size == 1 and facts.engine == "sglang":
        return Check(
            "block size", "problem", "1 token: the engine makes a KV event of every token",
            "Start SGLang with --page-size 64",
        )  # fmt: skip
    return Check("block size", "ok", f"{facts.block_size} tokens")


def kv_events(facts: NodeFacts, unreachable: list[str], sample: SampleResult | None) -> Iterator[Check]:
    """`sample` is None if no request was sent."""
    name, endpoints = "KV events", facts.endpoints or []
    if facts.config.kv_events == "off":
        yield Check(name, "ok", 'off in the configuration (kv_events = "off")')
        return
    if why := engine_of(facts.engine).why_no_subscription:
        yield Check(name, "note", why)
        return
    if not endpoints:
        found = "the engine publishes none; the router infers the cache from the requests that it sends"
        if facts.endpoints is None:
            found = "the engine does not say whether it publishes any"
        change = engine_of(facts.engine).to_publish_kv_events
        if facts.endpoints is None:
            change += "\nIf it does already: " + _nodes_line(facts.name, 'kv_events = "tcp://*:5557"')
        yield Check(name, "problem", found, change)
        return
    shown = ", ".join(one.endpoint for one in endpoints[:4]) + (" …" if len(endpoints) > 4 else "")
    closed = [one for one in unreachable if any(one == endpoint.endpoint for endpoint in endpoints)]
    if closed:
        yield Check(
            name, "problem", f"nothing accepts a connection at {', '.join(closed[:4])}",
            "Open this port between the router and the node. The endpoint in the engine's flag must contain *, "
            "for example tcp://*:5557",
        )  # fmt: skip
    elif sample is None:
        yield Check(name, "ok", f"{shown} accepts the subscription; whether events flow was not checked")
    elif sample.error:
        yield Check(name, "note", f"{shown} accepts the subscription; the sample request failed")
    elif sample.has_event:
        yield Check(name, "ok", f"{shown}; an event arrived for a sample request")
    elif sample.unreadable:
        yield Check(
            name, "problem", f"the router cannot read what {shown} sends: {sample.unreadable}",
            f"Check that the port is that of the engine's KV events. {engine_of(facts.engine).to_publish_kv_events}",
        )  # fmt: skip
    elif facts.prefix_caching is False:
        yield Check(name, "problem", f"{shown}; no event arrived, because prefix caching is off",
                    engine_of(facts.engine).to_cache_prefixes)  # fmt: skip
    else:
        yield Check(
            name, "problem", f"{shown} accepts the subscription, but no event arrived for a sample request",
            f"Check that the port belongs to this engine. {engine_of(facts.engine).to_publish_kv_events}",
        )  # fmt: skip
    yield _replay(facts, unreachable)


def _replay(facts: NodeFacts, unreachable: list[str]) -> Check:
    replays = [one.replay for one in facts.endpoints or [] if one.replay]
    closed = [one for one in replays if one in unreachable]
    if not replays:
        return Check(
            "KV replay", "problem", "the engine replays no events: one lost event costs the router all it knew",
            f"Add a replay_endpoint. {engine_of(facts.engine).to_publish_kv_events}",
        )  # fmt: skip
    if closed:
        return Check(
            "KV replay", "problem", f"nothing accepts a connection at {', '.join(closed[:4])}",
            "Open this port between the router and the node",
        )  # fmt: skip
    return Check("KV replay", "ok", ", ".join(replays[:4]))


def cached_tokens(facts: NodeFacts, sample: SampleResult | None) -> Check:
    name = "cached tokens"
    if sample is None:
        if "enable_cache_report" not in facts.server_info:
            return Check(name, "note", "not checked, because no request was sent (--no-requests)")
        reports = bool(facts.server_info["enable_cache_report"])
    elif sample.error:
        return Check(name, "note", f"not checked: the sample request failed, {sample.error}")
    else:
        reports = sample.reports_cached_tokens
    if reports:
        return Check(name, "ok", "responses report them")
    return Check(
        name, "problem", "responses do not report them, so the router cannot check its predictions",
        engine_of(facts.engine).to_report_cached_tokens,
    )  # fmt: skip


# Which tokenizer the router would use for each model, and whether its tokens are the nodes'.

LOAD_S: Final = 400.0
"""Time to find, download and load all tokenizers."""
_SOURCES: Final = {
    "configured": "from the configuration",
    "node_path": "at the path that the node reports",
    "hugging_face_cache": "from the Hugging Face cache",
    "download": "downloaded",
}


async def find_tokenizers(config: Config, nodes: list[NodeFacts]) -> dict[str, TokenizerStatus]:
    """Find the tokenizers of all models as the router would. Raises ConfigError."""
    registry = TokenizerRegistry(config.prompts, config.models, locate=find_tokenizer_files)
    try:
        await registry.load_configured()
        for facts in nodes:
            registry.set_model_cards(facts.name, facts.cards)
        names = [card["id"] for facts in nodes for card in facts.bases]
        async with asyncio.timeout(LOAD_S):
            await registry.until_loaded()
        return {name: registry.status(name) for name in names}
    except TimeoutError:
        raise ConfigError(f"the tokenizers were not loaded within {LOAD_S:g} s") from None
    finally:
        registry.close()


def tokenizer_checks(facts: NodeFacts, statuses: Mapping[str, TokenizerStatus], config: Config) -> Iterator[Check]:
    named = {model.name for model in config.models}
    for card in facts.bases:
        status = statuses.get(card["id"])
        if status is None:
            continue
        tokenizer = status.tokenizer.tokenizer if status.tokenizer is not None else None
        if tokenizer is None and config.prompts.remote_tokenize and engine_of(facts.engine).tokenizes == "chats":
            yield Check("tokenizer", "ok", f"{status.model}: the router asks the node's /tokenize for each prompt")
        elif tokenizer is None and facts.is_simulated and status.model not in named:
            found = f"none for {status.model}: the router matches prompts by their text, since the engine is simulated"
            yield Check("tokenizer", "note", found, "For exact tokens, start it with --tokenizer DIR")
        elif tokenizer is None:
            where = f"{status.hub_id}: " if status.hub_id else ""
            advice = missing_advice(status, status.model in named, config.prompts.download_tokenizers)
            yield Check("tokenizer", "problem", f"none for {status.model}; {where}{status.reason}", advice)
        elif tokenizer.inexact_reason:
            yield Check("tokenizer", "note", f"{status.path}, but inexact: {tokenizer.inexact_reason}")
        else:
            slow = f"; slow, because {tokenizer.slow_reason}" if tokenizer.slow_reason else ""
            yield Check("tokenizer", "ok", f"{status.path}, {_SOURCES.get(status.source, status.source)}{slow}")


async def template_checks(facts: NodeFacts, http: NodeHttp, statuses: Mapping[str, TokenizerStatus]) -> list[Check]:
    """Compare the tokens of sample prompts with the node's /tokenize."""

    async def tokenize(path: bytes, body: bytes) -> tuple[int, bytes]:
        request = tokenize_request(path, body)
        assert isinstance(request, bytes)
        answer = await http.post("/tokenize", request)
        if answer.error:
            raise ConnectionError(answer.error)
        return answer.status, answer.body

    checks: list[Check] = []
    for card in facts.bases:
        status = statuses.get(card["id"])
        if status is None or status.tokenizer is None or status.tokenizer.tokenizer is None:
            continue
        if not engine_of(facts.engine).tokenizes:
            checks.append(Check("chat template", "note", "not compared: the engine has no /tokenize"))
            continue
        try:
            found = await compare_tokens(
                status.model, status.tokenizer, tokenize, engine_of(facts.engine).tokenizes == "chats"
            )
            checks.append(_agreement_check(status.model, found))
        except NodeDidNotAnswer as problem:
            checks.append(Check("chat template", "note", f"not compared: {problem}"))
    return checks


def _agreement_check(model: str, found: Agreement) -> Check:
    name = "chat template"
    if found.state == "unavailable":
        return Check(name, "note", f"not compared: the node has no /tokenize ({found.reason})")
    if found.state == "not_comparable":
        return Check(name, "note", f"not compared: {found.reason}")
    if found.state == "agrees":
        if not found.chats:
            return Check(name, "note", "a text has the same tokens; chats were not compared, because the engine cannot")
        return Check(name, "ok", "the node's /tokenize makes the same tokens of sample chats")
    if found.differs == "tokenizer":
        return Check(
            name, "problem", f"the tokenizers differ: {found.reason}",
            f'In the [[models]] table of {model}, set\n    tokenizer = "/PATH"  # the files that the engine uses',
        )  # fmt: skip
    return Check(
        name, "problem", f"the chat templates differ: {found.reason}",
        f"In the [[models]] table of {model}, set what the engine was started with\n"
        '    chat_template = "/PATH/template.jinja"  # --chat-template\n'
        "    default_chat_template_kwargs = { enable_thinking = false }  # --default-chat-template-kwargs",
    )  # fmt: skip
