"""Two real vLLM engines with a real LMCache: one loads from the shared store what the other one has prefilled."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from real_asking import STREAM, body_of, made_up, run, told
from real_engine import BLOCK, RealEngine, make_tiny_model, running
from support.polling import until
from support.raw_client import Response, post
from support.running_router import RunningRouter, router

LMCACHE = Path(os.environ.get("WARMROUTE_LMCACHE_VENV", Path(__file__).resolve().parents[2] / ".venv-lmcache"))
"""The environment with vLLM and LMCache. `make test-real` makes it."""
pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]
PATIENCE_S = 120.0
PROMPT_TOKENS = 20 * BLOCK + 5
CONNECTOR = '{"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}'


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RealEngine]]:
    """Engines whose LMCache stores chunks as files in one directory."""
    folder = tmp_path_factory.mktemp("lmcache")
    (folder / "store").mkdir()
    settings = folder / "lmcache.yaml"
    settings.write_text(
        f"chunk_size: {BLOCK}\nlocal_cpu: true\nmax_local_cpu_size: 0.1\n"
        f'remote_url: "fs://localhost:0{folder}/store"\nremote_serde: "naive"\n'
    )
    python = LMCACHE / "bin" / "python"
    assert python.exists(), f"There is no {python}. `make test-real` installs LMCache."
    model = make_tiny_model(folder)
    environment = {
        "LMCACHE_CONFIG_FILE": str(settings), "LMCACHE_TRACK_USAGE": "false",
        "PYTHONHASHSEED": "0",  # both engines have to hash chunks alike
    }  # fmt: skip
    found = [
        RealEngine(
            name, model, folder, flags=["--kv-transfer-config", CONNECTOR], python=python, script="serve_lmcache.py",
            environment=environment,
        )
        for name in ("a", "b")
    ]  # fmt: skip
    with running(found):
        yield found


@asynccontextmanager
async def store_router(engines: list[RealEngine]) -> AsyncIterator[RunningRouter]:
    nodes: list[dict[str, Any]] = [{"url": engine.url, "kv_store": "shared"} for engine in engines]
    tables: dict[str, Any] = {
        "routing": {"policy": "price", "seed": 7}, "index": {"min_prompt_tokens": 16},
        "kv_stores": [{"name": "shared", "capacity_tokens": 1_000_000}], "journal": {"response_headers": "always"},
        "models": [{"name": "tiny", "tokenizer": str(engines[0].model)}],
        "health": {"interval_s": 0.2, "timeout_s": 5.0},
        "upstream": {"first_byte_timeout_s": PATIENCE_S, "between_chunks_timeout_s": PATIENCE_S},
    }  # fmt: skip
    async with router(*nodes, check_leaks=False, **tables) as r:
        await until(
            lambda: all(cache.capacity_blocks for cache in r.service.cache_view), "metrics are read", PATIENCE_S
        )
        yield r


async def ask(r: RunningRouter, tokens: list[int]) -> Response:
    peer = await r.connect()
    peer.write(post(body_of(tokens, 6, logprobs=1, **STREAM), "/v1/completions"))
    response = await peer.response(patience_s=PATIENCE_S)
    peer.close()
    assert response.status == 200 and response.complete, response.body
    return response


def logprobs(response: Response) -> list[float]:
    """Return the log probabilities of an answer's tokens. Unlike its tokens, they differ if the KV cache differs."""
    events = [json.loads(line[6:]) for line in response.body.splitlines() if line.startswith(b"data: {")]
    choices = [choice for event in events for choice in event["choices"]]
    return [value for choice in choices for value in choice["logprobs"]["token_logprobs"]]


def test_a_node_loads_what_another_one_has_prefilled(engines: list[RealEngine]) -> None:
    async def work() -> None:
        async with store_router(engines) as r:
            tokens = made_up(1, PROMPT_TOKENS)
            first = await ask(r, tokens)
            name = first.get("x-warmroute-node")
            assert name is not None and told(first.body).cached_tokens == 0
            await r.admin("POST", f"/admin/nodes/{name}/drain")
            for node in r.service.fleet:
                node.speed.guess(2.0)  # a slow engine: loading pays off
            second = await ask(r, tokens)
            assert second.get("x-warmroute-node") not in (None, name)
            assert logprobs(second) == pytest.approx(logprobs(first), abs=0.02), "the KV cache is that of the prompt"
            other = await ask(r, made_up(3, PROMPT_TOKENS))
            assert logprobs(other) != pytest.approx(logprobs(first), abs=0.02), "another prompt has other probabilities"
            loaded = told(second.body).cached_tokens
            assert loaded >= PROMPT_TOKENS - 2 * BLOCK, "LMCache did load it"
            entry = (await r.admin("GET", "/admin/decisions?limit=2")).json["decisions"][1]
            assert entry["store"] == "shared" and abs(entry["store_tokens"] - loaded) <= 2 * BLOCK
            accuracy = r.service.cache_view.stores["shared"].accuracy
            assert accuracy.compared == 1 and accuracy.agreement() > 0.9

    run(work)


def test_a_prompt_that_nobody_has_prefilled_is_not_expected_in_the_store(engines: list[RealEngine]) -> None:
    async def work() -> None:
        async with store_router(engines) as r:
            response = await ask(r, made_up(2, PROMPT_TOKENS))
            entry = (await r.admin("GET", "/admin/decisions?limit=1")).json["decisions"][0]
            assert told(response.body).cached_tokens == 0 and not entry.get("store_tokens")

    run(work)
