"""`warmroute doctor`: asks each node of a configuration what the router needs from it, and says what to change."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator, Mapping
from typing import Final

from warmroute.app.doctor import checks
from warmroute.app.doctor.answers import NodeFacts, NodeHttp, ask_node, send_sample, unreachable_endpoints
from warmroute.app.doctor.checks import Check, Report, Subject, find_tokenizers, template_checks, tokenizer_checks
from warmroute.app.startup import check_startup
from warmroute.config import Config, ConfigError
from warmroute.config.clients import canonical_address
from warmroute.edge.connection_pool import node_tls
from warmroute.prompt.registry import TokenizerStatus

# Examines the configuration, its nodes and the fleet as a whole.

MAX_CONCURRENT: Final = 16
"""Nodes that are examined at the same time."""


async def examine(config: Config, timeout_s: float, send_requests: bool) -> Report:
    startup = await asyncio.to_thread(check_startup, config)
    found = [Check("configuration", "problem", problem, "Correct it") for problem in startup.problems]
    found += [Check("configuration", "note", warning) for warning in startup.warnings]
    try:
        tls = node_tls(config.upstream)
    except ConfigError:
        return Report([Subject("configuration", found)])
    clients = [NodeHttp(node, tls, timeout_s) for node in config.nodes]
    slots = asyncio.Semaphore(MAX_CONCURRENT)

    async def ask(number: int) -> NodeFacts:
        async with slots:
            return await ask_node(config.nodes[number], clients[number], config.health.path)

    nodes = list(await asyncio.gather(*(ask(number) for number in range(len(clients)))))
    answering = [facts for facts in nodes if not facts.health.error]
    statuses: dict[str, TokenizerStatus] = {}
    try:
        statuses = await find_tokenizers(config, answering)
    except ConfigError as error:
        known = {check.found for check in found}
        found += [Check("configuration", "problem", one, "Correct it") for one in error.problems if one not in known]

    async def check(facts: NodeFacts, http: NodeHttp) -> Subject:
        async with slots:
            listed = await _check_node(facts, http, config, statuses, send_requests)
            return Subject(facts.name, listed, facts.config.url)

    subjects = await asyncio.gather(*(check(facts, http) for facts, http in zip(nodes, clients, strict=True)))
    configuration = [Subject("configuration", found or [Check("configuration", "ok", "`warmroute serve` accepts it")])]
    fleet = [*_check_fleet(config, answering), *await _same_engines(answering)]
    return Report([*configuration, *subjects, *([Subject("fleet", fleet)] if fleet else [])])


async def _check_node(
    facts: NodeFacts,
    http: NodeHttp,
    config: Config,
    statuses: Mapping[str, TokenizerStatus],
    send_requests: bool,
) -> list[Check]:
    first = checks.reachable(facts, config.health.path)
    if facts.health.error:
        return [first]
    found = [first, checks.engine(facts), checks.models(facts)]
    if facts.bases:
        found.append(checks.context_window(facts))
        found += tokenizer_checks(facts, statuses, config)
        found += await template_checks(facts, http, statuses)
    found += [checks.prefix_caching(facts), checks.block_size(facts)]
    endpoints = facts.endpoints or [] if facts.config.kv_events != "off" else []
    unreachable = await unreachable_endpoints(endpoints)
    open_endpoints = [one for one in endpoints if one.endpoint not in unreachable]
    sample = await send_sample(facts, http, open_endpoints) if send_requests and facts.bases else None
    if config.uses_kv_events:
        found += checks.kv_events(facts, unreachable, sample)
    found += [checks.cached_tokens(facts, sample), checks.clock(facts), checks.lora(facts)]
    return found


def _check_fleet(config: Config, nodes: list[NodeFacts]) -> Iterator[Check]:
    served: dict[str, list[NodeFacts]] = {}
    for facts in nodes:
        for card in facts.cards:
            served.setdefault(card["id"], []).append(facts)
    for model in config.models:
        if nodes and model.name not in served and not any(model.name in facts.config.models for facts in nodes):
            names = ", ".join(sorted(served)) or "none"
            yield Check(
                "models", "problem", f"no node serves {model.name!r} of [[models]]; nodes serve {names}",
                f"Correct name = \"{model.name}\" in [[models]]: it is the name in requests",
            )  # fmt: skip
    for name, members in served.items():
        windows = {card.get("max_model_len") for facts in members for card in facts.bases if card["id"] == name}
        known = sorted(window for window in windows if isinstance(window, int))
        if len(known) > 1:
            shown = ", ".join(f"{window:,}" for window in known)
            yield Check(
                "context windows", "note", f"the nodes of {name} have different ones: {shown} tokens",
                "Start all of them with the same --max-model-len, unless long prompts are meant for some nodes only",
            )  # fmt: skip
    endpoints: dict[str, str] = {}
    for facts in nodes:
        for one in facts.endpoints or ():
            first = endpoints.setdefault(one.endpoint, facts.name)
            if first != facts.name:
                yield Check(
                    "KV events", "problem", f"{first} and {facts.name} have the same endpoint {one.endpoint}",
                    "Give each engine its own port for KV events, and each node its own kv_events in [[nodes]]",
                )  # fmt: skip


async def _same_engines(nodes: list[NodeFacts]) -> list[Check]:
    """Find nodes whose host names are the same machine, and whose ports are equal."""
    loop = asyncio.get_running_loop()
    names: dict[tuple[str, int], str] = {}
    found: list[Check] = []
    for facts in nodes:
        host, port = canonical_address(facts.config.url)
        try:
            async with asyncio.timeout(2.0):
                resolved = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, TimeoutError):
            continue
        for address in {(str(one[4][0]), port) for one in resolved}:
            first = names.setdefault(address, facts.name)
            if first != facts.name:
                problem = f"{first} and {facts.name} are the same engine: both are {address[0]}:{port}"
                change = f"Remove one of them from [[nodes]], for example {facts.name}"
                found.append(Check("nodes", "problem", problem, change))
                break
    return found
