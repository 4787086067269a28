"""Writes a commented configuration for nodes: what they answered, and what an operator may want to add."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Final

from warmroute.app.doctor import MAX_CONCURRENT, checks
from warmroute.app.doctor.answers import NodeFacts, NodeHttp, ask_node, printable
from warmroute.config import Config
from warmroute.edge.connection_pool import node_tls
from warmroute.engines import engine_of

_DEFAULTS: Final = {
    "prompts": ["download_tokenizers = false    # true: from the model's hub repository"],
    "log": ['level = "info"', 'format = "text"    # or "json"'],
    "limits": ["body_bytes = 33_554_432    # of a request; images need more"],
    "upstream": ["first_byte_timeout_s = 600    # until a response begins; without streaming, until it is complete"],
    "shutdown": [
        "delay_s = 0    # until load balancers notice that /ready is 503",
        "deadline_s = 30    # for running requests",
    ],
}


async def ask_nodes(config: Config, timeout_s: float) -> list[NodeFacts]:
    tls, slots = node_tls(config.upstream), asyncio.Semaphore(MAX_CONCURRENT)

    async def ask(number: int) -> NodeFacts:
        node = config.nodes[number]
        async with slots:
            return await ask_node(node, NodeHttp(node, tls, timeout_s), config.health.path)

    return list(await asyncio.gather(*(ask(number) for number in range(len(config.nodes)))))


def problem_of(facts: NodeFacts) -> str:
    """Return why the node's table has less than it could have; empty if all is there."""
    if facts.health.error:
        return f"did not answer: {facts.health.error}"
    path, status = facts.refused
    return f"answered {status} to GET {path}: {checks.key_advice(facts)[0]}" if status else ""


def starter_config(nodes: list[NodeFacts], host: str, port: int, admin_port: int) -> str:
    """Return the text of a configuration file."""
    return "\n".join(_lines(nodes, host, port, admin_port)) + "\n"


def _lines(nodes: list[NodeFacts], host: str, port: int, admin_port: int) -> Iterator[str]:
    yield "# Configuration of Warmroute, by `warmroute init`. docs/reference/configuration.md explains every key."
    yield "# `warmroute check-config FILE` checks it. The running router reads it again when it changes."
    yield ""
    yield "[listen]"
    yield f"host = {_text(host)}    # 0.0.0.0 or :: for all addresses: then add [[keys]]"
    yield f"port = {port}"
    yield '# tls_cert = "/etc/warmroute/tls.crt"'
    yield '# tls_key = "/etc/warmroute/tls.key"'
    yield ""
    yield "[admin]                # live page, metrics and admin API"
    yield 'host = "127.0.0.1"     # other addresses need token_sha256'
    yield f"port = {admin_port}"
    yield '# token_sha256 = "…"    # `warmroute hash-key` prints a token and its hash'
    yield ""
    yield "# Drains, roles and nodes of the admin API survive a restart with:"
    yield "# [state]"
    yield '# directory = "/var/lib/warmroute"'
    yield ""
    yield "# One for each client. `warmroute hash-key` prints the hash of a key."
    yield "# [[keys]]"
    yield '# tenant = "team-a"'
    yield '# sha256 = "…"'
    yield ""
    for facts in nodes:
        yield from _node(facts)
        yield ""
    yield from _models(nodes)
    yield "# Engines that others start: files, DNS, Kubernetes (docs/guides/discovery.md)."
    yield "# [[discovery]]"
    yield '# kind = "file"'
    yield '# file = "/etc/warmroute/targets.json"'
    yield ""
    yield "# What else operators set, with the defaults."
    for table, lines in _DEFAULTS.items():
        yield f"# [{table}]"
        yield from (f"# {line}" for line in lines)


def _node(facts: NodeFacts) -> Iterator[str]:
    """Yield the node's table, after comments on what it answered and which flags its engine lacks."""
    if problem := problem_of(facts):
        yield f"# It {printable(problem, 300)}"
    if not facts.health.error:
        engine = f"{facts.engine or 'unknown engine'} {facts.version}".strip()
        models = ", ".join(_described(card) for card in facts.bases) or "no models"
        yield f"# {engine}: {models}"
        if facts.adapters:
            yield f"# LoRA adapters: {', '.join(printable(name) for name in facts.adapters[:8])}"
        if facts.prefix_caching is False:
            yield f"# Prefix caching is off: {engine_of(facts.engine).to_cache_prefixes}"
        if facts.engine and not engine_of(facts.engine).why_no_subscription and not facts.endpoints:
            yield "# It publishes no KV events, so the router infers its cache. To publish them:"
            yield from (f"#     {line}" for line in engine_of(facts.engine).to_publish_kv_events.splitlines())
    yield "[[nodes]]"
    yield f"url = {_text(facts.config.url)}"
    if facts.engine and not facts.is_detected:
        yield f"engine = {_text(facts.engine)}    # its metrics do not show it"
    yield '# island = "aws/us-east-1"    # provider and region, if there are several'
    yield '# gpu = "L4"'
    if facts.config.api_key_env:
        yield f"api_key_env = {_text(facts.config.api_key_env)}    # an environment variable of the router"
    else:
        yield '# api_key_env = "ENGINE_API_KEY"'


def _described(card: dict[str, object]) -> str:
    window = card.get("max_model_len")
    return printable(card["id"]) + (f" (context window {window:,} tokens)" if isinstance(window, int) else "")


def _models(nodes: list[NodeFacts]) -> Iterator[str]:
    names = list(dict.fromkeys(str(card["id"]) for facts in nodes for card in facts.bases))
    if names:
        yield "# The router reads prompts with the model's tokenizer. It finds it on this machine or, with"
        yield "# download_tokenizers = true in [prompts], in the model's hub repository. Otherwise name its directory:"
        for name in names[:8]:
            yield "# [[models]]"
            yield f"# name = {_text(printable(name, 200))}"
            yield f"# tokenizer = {_text('/models/' + printable(name, 200).rpartition('/')[2])}"
        yield ""


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)
