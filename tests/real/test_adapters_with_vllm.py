"""LoRA adapters on two real vLLM engines that keep one each: what is believed of them is what the engines do."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Iterator

import pytest
from real_asking import BLOCK, STREAM, body_of, made_up, routed, run, told
from real_engine import RealEngine, running
from support import raw_client
from support.polling import until
from support.vllm_environment import vllm_python

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]
ADAPTERS = ("one", "two")
MAKE_ADAPTER = """
import json, pathlib, sys, torch
from safetensors.torch import save_file
folder = pathlib.Path(sys.argv[1])
folder.mkdir()
torch.manual_seed(int(sys.argv[2]))
matrices = {}
for layer in range(2):
    name = f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_"
    matrices |= {name + end: torch.randn(shape, dtype=torch.bfloat16) for end, shape in
                 (("A.weight", (8, 64)), ("B.weight", (64, 8)))}
save_file(matrices, folder / "adapter_model.safetensors")
(folder / "adapter_config.json").write_text(json.dumps({
    "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 8, "lora_alpha": 16, "lora_dropout": 0.0, "bias": "none",
    "target_modules": ["q_proj"], "base_model_name_or_path": "tiny", "inference_mode": True}))
"""


@pytest.fixture(scope="module")
def adapted(real_engines: list[RealEngine]) -> Iterator[list[RealEngine]]:
    """Two more engines, which serve both adapters."""
    model, folder = real_engines[0].model, real_engines[0].folder
    for seed, name in enumerate(ADAPTERS):
        command = [str(vllm_python()), "-c", MAKE_ADAPTER, str(folder / name), str(seed)]
        subprocess.run(command, check=True, capture_output=True)
    flags = ["--enable-lora", "--max-loras", "1", "--max-lora-rank", "8", "--lora-modules"]
    flags += [f"{name}={folder / name}" for name in ADAPTERS]
    engines = [RealEngine(f"adapted-{name}", model, folder, flags=flags) for name in ("a", "b")]
    with running(engines):
        yield engines


def test_adapters_stay_where_they_are_loaded(adapted: list[RealEngine]) -> None:
    """Prompts share nothing: without the adapter's price every one could go anywhere."""

    async def work() -> None:
        async with routed("price", *(engine.url for engine in adapted)) as router:
            fleet = router.service.fleet
            await until(lambda: set(fleet.models) == {"tiny", *ADAPTERS}, "the adapters are listed", 30)
            went: dict[str, set[str]] = {name: set() for name in ADAPTERS}
            for number in range(16):
                adapter = ADAPTERS[(number // 2) % 2]
                asked = raw_client.post(
                    body_of(made_up(number, 70), 3, adapter), "/v1/completions", [f"X-Request-Id: {number}"]
                )
                answer = await router.request(asked)
                assert answer.status == 200 and answer.json["model"] == adapter, answer.body
                did = (await router.admin("GET", f"/admin/decisions/{number}")).json
                went[adapter].add(did["answered_by"])
                term = next(each["terms_ms"]["adapter"] for each in did["candidates"] if each["chosen"])
                assert (term > 0.0) == (number in (0, 2)), did["explanation"]
                node = fleet.node(did["answered_by"])
                await until(lambda: node.loaded_adapters.slots == 1, "told by an engine that has served an adapter")  # noqa: B023
            assert all(len(nodes) == 1 for nodes in went.values()) and went["one"] != went["two"], went
            assert sum(node.loaded_adapters.load_count for node in fleet) == 2
            for node in fleet:
                assert list(node.loaded_adapters) == [name for name in ADAPTERS if went[name] == {node.name}]

    run(work)


def test_what_one_adapter_has_cached_is_cold_for_another(adapted: list[RealEngine]) -> None:
    async def work() -> None:
        async with routed("price", adapted[0].url) as router:
            await until(lambda: set(router.service.fleet.models) == {"tiny", *ADAPTERS}, "the adapters are listed", 30)
            tokens = made_up(77, 5 * BLOCK + 3)
            for number, (model, warm) in enumerate(
                (("one", 0), ("one", 5 * BLOCK), ("tiny", 0), ("two", 0), ("tiny", 5 * BLOCK), ("one", 5 * BLOCK))
            ):
                asked = raw_client.post(
                    body_of(tokens, 2, model, **STREAM), "/v1/completions", [f"X-Request-Id: cold-{number}"]
                )
                answer = await router.request(asked)
                assert answer.status == 200, answer.body
                did = (await router.admin("GET", f"/admin/decisions/cold-{number}")).json
                assert told(answer.body).cached_tokens == warm == did["cached_tokens"], json.dumps(did)
                await asyncio.sleep(0.1)

    run(work)
