"""What a node's answers mean for the router, and what to change. No I/O."""

from __future__ import annotations

from collections.abc import Iterator

from warmroute.doctor import engine_flags as flags
from warmroute.doctor.checks import Check
from warmroute.doctor.node_facts import NodeFacts
from warmroute.doctor.sample_request import SampleResult

MAX_CLOCK_SKEW_S = 2.0


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


def key_advice(facts: NodeFacts) -> tuple[str, str]:
    """Return why a node refuses requests, and what to change."""
    variable = facts.config.api_key_env
    if not variable:
        line = 'api_key_env = "NODE_API_KEY"  # an environment variable of the router'
        return "the node requires an API key", flags.nodes_line(facts.name, line)
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
    name = flags.ENGINE_NAMES.get(facts.engine, "")
    shown = f"{name} {facts.version}".strip()
    if not facts.engine:
        return Check(
            "engine", "problem", "the engine is unknown: neither its metrics nor its models name it",
            flags.nodes_line(facts.name, 'engine = "vllm"  # or "sglang", "trtllm"'),
        )  # fmt: skip
    if facts.load is None:
        status = facts.metrics.error or f"answers {facts.metrics.status}" if not facts.metrics.ok else "has no load"
        change = flags.metrics(facts.engine)
        if not facts.is_detected:
            change += ". " + flags.nodes_line(facts.name, f'engine = "{facts.engine}"')
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
        "models", "problem", f"GET /v1/models {reason}", flags.nodes_line(facts.name, 'models = ["NAME"]'),
    )  # fmt: skip


def context_window(facts: NodeFacts) -> Check:
    configured = facts.config.max_model_len
    windows = {card["id"]: configured or card.get("max_model_len") for card in facts.bases}
    unknown = [name for name, window in windows.items() if not isinstance(window, int)]
    if unknown:
        return Check(
            "context window", "note", f"the engine does not report that of {', '.join(unknown)}",
            flags.nodes_line(facts.name, "max_model_len = 32768  # as the engine was started"),
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
        "prefix caching", "problem", "off: every prompt is prefilled again", flags.prefix_caching(facts.engine)
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
    if facts.engine == "trtllm":
        yield Check(name, "note", "not checked: the engine returns each event once, and the router needs them")
        return
    if not endpoints:
        found = "the engine publishes none; the router infers the cache from the requests that it sends"
        if facts.endpoints is None:
            found = "the engine does not say whether it publishes any"
        change = flags.kv_events(facts.engine)
        if facts.endpoints is None:
            change += "\nIf it does already: " + flags.nodes_line(facts.name, 'kv_events = "tcp://*:5557"')
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
    elif facts.prefix_caching is False:
        yield Check(name, "problem", f"{shown}; no event arrived, because prefix caching is off",
                    flags.prefix_caching(facts.engine))  # fmt: skip
    else:
        yield Check(
            name, "problem", f"{shown} accepts the subscription, but no event arrived for a sample request",
            f"Check that the port belongs to this engine. {flags.kv_events(facts.engine)}",
        )  # fmt: skip
    yield _replay(facts, unreachable)


def _replay(facts: NodeFacts, unreachable: list[str]) -> Check:
    replays = [one.replay for one in facts.endpoints or [] if one.replay]
    closed = [one for one in replays if one in unreachable]
    if not replays:
        return Check(
            "KV replay", "problem", "the engine replays no events: one lost event costs the router all it knew",
            flags.replay(facts.engine),
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
        flags.cache_report(facts.engine),
    )  # fmt: skip
