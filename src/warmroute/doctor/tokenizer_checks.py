"""Which tokenizer the router would use for each model, and whether its tokens are the nodes'."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from typing import Final

from warmroute.config import Config, ConfigError
from warmroute.doctor.checks import Check
from warmroute.doctor.node_facts import NodeFacts
from warmroute.doctor.node_http import NodeHttp
from warmroute.engines.remote_tokenizer import tokenize_request
from warmroute.prompt.engine_agreement import Agreement, NodeDidNotAnswer, compare_tokens
from warmroute.prompt.tokenizer_registry import TokenizerRegistry
from warmroute.prompt.tokenizer_status import TokenizerStatus
from warmroute.service.model_watch import CHAT_ENGINES, TEXT_ENGINES, missing_advice
from warmroute.service.tokenizer_search import find_tokenizer_files

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
        if tokenizer is None and config.prompts.remote_tokenize and facts.engine in CHAT_ENGINES:
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
        if facts.engine not in (*CHAT_ENGINES, *TEXT_ENGINES):
            checks.append(Check("chat template", "note", "not compared: the engine has no /tokenize"))
            continue
        try:
            found = await compare_tokens(status.model, status.tokenizer, tokenize, facts.engine in CHAT_ENGINES)
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
