"""A real Envoy in front of simulated engines, with endpoints from the picker: `make test-picker`."""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import pytest
from envoy_fleet import Load, PickerProcess, fast_engines, port_of, request_body
from envoy_process import ROOT, Envoy, running_envoy
from support.engine_processes import FakeEngine

from warmroute.lab.demo.processes import Children

pytestmark = [pytest.mark.real, pytest.mark.timeout(900), pytest.mark.usefixtures("experiment")]

MODES = [("buffered", "skipped"), ("buffered", "headers"), ("buffered", "streamed"), ("streamed", "streamed"),
         ("duplex", "duplex"), ("duplex", "headers")]  # fmt: skip
SOAK = int(os.environ.get("WARMROUTE_SOAK_REQUESTS", "2000"))


def test_envoy_accepts_the_manifest() -> None:
    command = [
        str(ROOT / ".venv-envoy" / "bin" / "envoy"),
        "--mode",
        "validate",
        "-c",
        str(ROOT / "deploy/envoy/envoy.yaml"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.fixture(scope="module")
def children() -> Iterator[Children]:
    with Children() as running:
        yield running


@pytest.fixture(scope="module")
def fleet(children: Children) -> Any:
    engines = fast_engines(children, 3)
    return engines, PickerProcess(children, [engine.url for engine in engines])


@pytest.mark.parametrize(("request_mode", "responses"), MODES)
def test_openais_client_works_in_every_mode(fleet: Any, tmp_path: Path, request_mode: str, responses: str) -> None:
    engines, picker = fleet
    with running_envoy(
        tmp_path, picker.port, [port_of(one) for one in engines], request_mode=request_mode, responses=responses
    ) as envoy:
        client = openai.OpenAI(base_url=f"{envoy.url}/v1", api_key="x", max_retries=0, timeout=30.0)
        assert [model.id for model in client.models.list()] == ["sim"]
        for size in (1_000, 100_000, 1_000_000):
            messages: Any = [{"role": "user", "content": "abcdefg " * (size // 8)}]
            whole = client.chat.completions.create(model="sim", messages=messages, max_tokens=6)
            assert whole.usage is not None and whole.usage.completion_tokens == 6
            stream = client.chat.completions.create(
                model="sim", messages=messages, max_tokens=6, stream=True, stream_options={"include_usage": True}
            )
            chunks = list(stream)
            assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 6
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            client.chat.completions.create(model="other", messages=[{"role": "user", "content": "x"}])
        with pytest.raises(openai.APIStatusError) as too_large:
            client.post("/chat/completions", body={"x": "y" * 34_000_000}, cast_to=object)
        assert too_large.value.status_code == 413
        with pytest.raises(openai.BadRequestError):
            client.post("/chat/completions", body={"model": "sim"}, cast_to=object)
        picker.until_idle()


@pytest.mark.parametrize("responses", ["skipped", "headers", "streamed", "duplex"])
def test_clients_get_the_headers_of_the_proxy(children: Children, tmp_path: Path, responses: str) -> None:
    engines = fast_engines(children, 1)
    flags = tmp_path / "headers.toml"
    flags.write_text('[journal]\nresponse_headers = "always"\n')
    picker = PickerProcess(children, [engines[0].url], "--config", str(flags))
    with running_envoy(
        tmp_path, picker.port, [port_of(engines[0])], request_mode="duplex" if responses == "duplex" else "buffered",
        responses=responses,
    ) as envoy:  # fmt: skip
        answer = httpx.post(f"{envoy.url}/v1/chat/completions", content=request_body("word " * 500, True))
        assert answer.status_code == 200
        if responses == "skipped":
            assert "x-warmroute-node" not in answer.headers
        else:
            assert answer.headers["x-warmroute-node"] == f"127.0.0.1:{port_of(engines[0])}"
            assert "/" in answer.headers["x-warmroute-hit"]
            [request_id] = answer.headers.get_list("x-request-id")
            assert request_id.encode() in picker.admin("/admin/decisions")
        wrong = httpx.post(f"{envoy.url}/v1/chat/completions", content=b"{")
        assert wrong.status_code == 400 and wrong.headers["x-request-id"]


def test_a_subset_hint_restricts_the_endpoints(fleet: Any, tmp_path: Path) -> None:
    engines, picker = fleet
    ports = [port_of(one) for one in engines]
    before = [one.metric("vllm:request_success_total") for one in engines]
    with running_envoy(tmp_path, picker.port, ports, subset=[f"127.0.0.1:{ports[1]}"]) as envoy:
        for number in range(6):
            answer = httpx.post(f"{envoy.url}/v1/chat/completions", content=request_body(f"{number}", False))
            assert answer.status_code == 200
    after = [one.metric("vllm:request_success_total") for one in engines]
    assert [new - old for new, old in zip(after, before, strict=True)] == [0, 6, 0]
    with running_envoy(tmp_path, picker.port, ports, subset=[]) as envoy:
        answer = httpx.post(f"{envoy.url}/v1/chat/completions", content=request_body("x", False))
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_node_in_subset")


@pytest.mark.parametrize(
    ("request_mode", "responses", "like_envoy_gateway"),
    [("buffered", "headers", False), ("duplex", "duplex", False), ("buffered", "streamed", True)],
)
def test_a_dead_first_endpoint_leads_to_the_fallback(
    children: Children, tmp_path: Path, request_mode: str, responses: str, like_envoy_gateway: bool
) -> None:
    engines = fast_engines(children, 2)
    flags = tmp_path / "slow.toml"
    flags.write_text("[health]\ninterval_s = 3600.0\nconsecutive_failures = 1000\n[polling]\ninterval_s = 3600.0\n")
    picker = PickerProcess(children, [one.url for one in engines], "--config", str(flags), "--policy", "round_robin")
    ports = [port_of(one) for one in engines]
    with running_envoy(
        tmp_path, picker.port, ports, request_mode=request_mode, responses=responses,
        like_envoy_gateway=like_envoy_gateway,
    ) as envoy:  # fmt: skip
        engines[0].child.process.kill()
        engines[0].child.process.wait()
        statuses = [
            httpx.post(f"{envoy.url}/v1/chat/completions", content=request_body(f"{number}", True)).status_code
            for number in range(20)
        ]
        assert statuses == [200] * 20
        outcomes = picker.metrics("warmroute_node_requests_total")
        failed, ok = (
            outcomes[f'{{node="127.0.0.1:{port}",outcome="{outcome}"}}']
            for port, outcome in zip(ports, ("failed", "ok"), strict=True)
        )
        assert failed >= 1 and ok == 20  # the ticket moved to the node that served
        picker.until_idle()


def test_a_client_that_leaves_frees_the_node_within_a_moment(children: Children, tmp_path: Path) -> None:
    engines = [FakeEngine(children, speed=1)]
    picker = PickerProcess(children, [engines[0].url])
    for request_mode, responses in MODES:
        ports = [port_of(one) for one in engines]
        with running_envoy(tmp_path, picker.port, ports, request_mode=request_mode, responses=responses) as envoy:
            body = request_body("hello", True, max_tokens=8_000, ignore_eos=True)
            with httpx.stream("POST", f"{envoy.url}/v1/chat/completions", content=body) as stream:
                assert stream.status_code == 200
                pieces = stream.iter_bytes()
                next(pieces)
                in_flight = sum(picker.metrics("warmroute_node_requests_in_flight").values())
                # FULL_DUPLEX_STREAMED without bodies of responses: Envoy ends its stream at the response's head.
                assert in_flight == (0 if (request_mode, responses) == ("duplex", "headers") else 1)
            picker.until_idle(2.0)


@pytest.mark.parametrize("responses", ["headers", "streamed"])
def test_a_killed_picker_fails_requests_at_once_and_serves_again_after_its_restart(
    children: Children, tmp_path: Path, responses: str
) -> None:
    engines = fast_engines(children, 2)
    picker = PickerProcess(children, [one.url for one in engines])
    ports = [port_of(one) for one in engines]
    with running_envoy(tmp_path, picker.port, ports, responses=responses) as envoy:
        url = f"{envoy.url}/v1/chat/completions"
        assert httpx.post(url, content=request_body("x", False)).status_code == 200
        picker.kill()
        started_s = time.monotonic()
        assert httpx.post(url, content=request_body("x", False), timeout=30.0).status_code in (500, 503, 504)
        assert time.monotonic() - started_s < 10.0
        picker.start()
        until_s = time.monotonic() + 20.0
        while httpx.post(url, content=request_body("x", False), timeout=30.0).status_code != 200:
            assert time.monotonic() < until_s
            time.sleep(0.1)
        checks = envoy.stats("cluster.picker.health_check")
        assert checks["cluster.picker.health_check.success"] >= 1


@pytest.mark.parametrize(("request_mode", "responses"), [("buffered", "headers"), ("duplex", "duplex")])
def test_thousands_of_requests_with_aborts_and_faults_leave_nothing_behind(
    children: Children, tmp_path: Path, request_mode: str, responses: str
) -> None:
    """Bodies from 1 KB to 1 MB, streams, aborts, a dead engine, and a picker that is killed and started again."""
    engines = fast_engines(children, 3)
    picker = PickerProcess(children, [one.url for one in engines])
    ports = [port_of(one) for one in engines]
    share = SOAK // 4

    async def soak(envoy: Envoy) -> None:
        load = Load(envoy.port)
        await load.run(share)
        engines[0].child.process.kill()
        await load.run(share)
        assert not {status for status in load.statuses if status not in ("200", "aborted")}, (
            load.statuses,
            load.errors,
        )
        running = asyncio.ensure_future(load.run(share))
        await asyncio.sleep(0.5)
        picker.kill()
        await asyncio.sleep(0.5)
        await asyncio.to_thread(picker.start)
        await running
        during = load.statuses.copy()
        await load.run(share)
        await asyncio.to_thread(picker.until_idle)
        assert load.statuses["HUNG"] == load.statuses["LOOKS COMPLETE"] == 0, load.statuses
        late = load.statuses - during
        assert not {status for status in late if status not in ("200", "aborted")}, (during, late)
        print(f"\n{request_mode}, {responses}: {dict(load.statuses)}, slowest {load.slowest_s:.1f} s")
        stats = envoy.stats("http.in.ext_proc")
        stats |= envoy.stats("cluster.engines.upstream_rq_retry")
        print({name: value for name, value in stats.items() if value})

    with running_envoy(
        tmp_path, picker.port, ports, request_mode=request_mode, responses=responses, message_timeout="30s"
    ) as envoy:
        asyncio.run(soak(envoy))  # longer than an async test may take


async def _hit_rate(port: int) -> float:
    """Run conversations, some at the same time. Return the share of prompt tokens that engines had cached."""
    cached = prompt = 0
    gate = asyncio.Semaphore(4)

    async def conversation(number: int) -> None:
        nonlocal cached, prompt
        text = f"conversation {number}: " + " ".join(f"word{(number * 31 + at) % 997}" for at in range(300))
        for turn in range(5):
            async with gate, httpx.AsyncClient(timeout=60.0) as client:
                body = request_body(text, False)
                answer = await client.post(f"http://127.0.0.1:{port}/v1/chat/completions", content=body)
            usage = answer.json()["usage"]
            cached += usage["prompt_tokens_details"]["cached_tokens"]
            prompt += usage["prompt_tokens"]
            text += f" turn {turn} " + " ".join(f"more{(number + at) % 499}" for at in range(80))

    await asyncio.gather(*map(conversation, range(24)))
    return cached / prompt


def test_the_hit_rate_is_that_of_the_proxy(children: Children, tmp_path: Path) -> None:
    def engines() -> list[FakeEngine]:
        return [FakeEngine(children, speed=50, blocks=1500) for _ in range(3)]  # too small for all on one

    for_proxy, rates = engines(), {}
    proxy = PickerProcess(children, [one.url for one in for_proxy], command="serve")
    rates["proxy"] = asyncio.run(_hit_rate(proxy.port))
    for request_mode, responses in (("buffered", "streamed"), ("buffered", "skipped"), ("duplex", "duplex")):
        fresh = engines()
        picker = PickerProcess(children, [one.url for one in fresh])
        ports = [port_of(one) for one in fresh]
        with running_envoy(tmp_path, picker.port, ports, request_mode=request_mode, responses=responses) as envoy:
            rates[f"{request_mode}, {responses}"] = asyncio.run(_hit_rate(envoy.port))
    print(f"\nhit rates: {rates}")
    assert rates["proxy"] > 0.5
    for observed in ("buffered, streamed", "duplex, duplex"):  # without responses the picker learns less
        assert rates[observed] > rates["proxy"] - 0.01
