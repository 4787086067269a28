"""A fleet for the live page: six simulated engines on two islands, four tenants, and a load on them. One tenant's
prompts begin with the current time, another one's client does not stream.

python tests/browser/live_page_scenario.py     runs it until Ctrl-C and prints the address of the page and its token
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from random import Random

import msgspec

from warmroute import http_client
from warmroute.lab.demo.processes import Child, Children, free_port, start_router
from warmroute.lab.engine.tokenizers import WORDS
from warmroute.lab.load import RequestFailed, RequestRefused, send_streaming

TOKEN = "open sesame"
MODEL = "qwen3-8b"
ENGINES = {f"eu-{number}": "eu-west" for number in range(1, 5)} | {f"us-{number}": "us-east" for number in range(1, 3)}
KEYS = {"search": "search-key", "chat": "chat-key", "batch": "batch-key", "reports": "reports-key"}
OUTPUT_TOKENS = 40


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


class Scenario:
    def __init__(self, url: str, admin_url: str, engine_urls: dict[str, str], config: Path) -> None:
        self.url = url
        self.admin_url = admin_url
        self._engine_urls = engine_urls
        self.config = config
        """The router's file, which it reads again when it changes."""
        self.completed = 0

    async def fail(self, engine: str, **fault: object) -> None:
        """Inject a fault into an engine, such as mode="die"."""
        body = json.dumps(fault).encode()
        with suppress(OSError):  # an engine that dies does not answer
            await http_client.request(
                "POST", f"{self._engine_urls[engine]}/_sim/fail", body=body, timeout_s=5.0, limit_bytes=10_000
            )

    async def fail_some_requests(self) -> None:
        """For a moment, every engine that is up answers most generations with 500."""
        for mode, share in (("error500", 0.9), ("none", 0.0)):
            for engine in ENGINES:
                await self.fail(engine, mode=mode, **({"share": share} if share else {}))
            if share:
                await asyncio.sleep(1.5)

    async def send_wrong_keys(self, count: int) -> None:
        """Wrong keys are answered late, but not if there are many at a time."""
        await asyncio.gather(*(self._post({"model": MODEL, "messages": []}, "sk-of-nobody") for _ in range(count)))

    async def _post(self, fields: dict[str, object], key: str) -> int:
        """Send a request whose response is not streamed. Return its status."""
        status, _ = await http_client.request(
            "POST", f"{self.url}/v1/chat/completions", msgspec.json.encode(fields),
            [("Authorization", f"Bearer {key}")], timeout_s=60.0, limit_bytes=1_000_000,
        )  # fmt: skip
        return status

    async def _report(self, number: int) -> None:
        random = Random(f"report {number}")
        while True:
            messages = [{"role": "user", "content": f"{REPORT} {words(random, 80)}"}]
            with suppress(OSError):
                await self._post({"model": MODEL, "messages": messages, "max_tokens": OUTPUT_TOKENS}, KEYS["reports"])
            await asyncio.sleep(random.uniform(0.5, 1.5))

    async def _ask(self, tenant: str, messages: list[dict[str, str]], **headers: str) -> str:
        fields = {"model": MODEL, "messages": messages, "max_tokens": OUTPUT_TOKENS, "stream": True}
        body = msgspec.json.encode({**fields, "stream_options": {"include_usage": True}})
        try:
            found = await send_streaming(
                self.url, "/v1/chat/completions", body, {"Authorization": f"Bearer {KEYS[tenant]}", **headers}, 60.0
            )
        except (RequestRefused, RequestFailed):
            return ""
        self.completed += 1
        return "".join(found.texts)

    async def _converse(self, tenant: str, number: int, system: str, priority: str) -> None:
        """Ask one question after the other, in conversations of six turns."""
        random = Random(f"{tenant} {number}")
        await asyncio.sleep(random.uniform(0, 3))
        while True:
            messages = [{"role": "system", "content": system}]
            document = words(random, 1500)
            for turn in range(6):
                question = words(random, 60)
                messages.append({"role": "user", "content": question if turn else f"{document} {question}"})
                if tenant == "batch":  # its client puts the time in front
                    messages[0]["content"] = f"Time: {datetime.now(UTC).isoformat()}\n{system}"
                answer = await self._ask(tenant, messages, **{"X-Priority": priority})
                messages.append({"role": "assistant", "content": answer or "none"})
                await asyncio.sleep(random.uniform(0.3, 1.5))

    async def send_load(self) -> None:
        systems = {name: words(Random(name), 700) for name in ("search", "chat", "batch")}
        async with asyncio.TaskGroup() as tasks:
            for tenant, clients, priority in (("search", 8, "normal"), ("chat", 8, "high"), ("batch", 5, "low")):
                for number in range(clients):
                    tasks.create_task(self._converse(tenant, number, systems[tenant], priority))
            for number in range(3):
                tasks.create_task(self._report(number))


def words(random: Random, count: int) -> str:
    return " ".join(random.choices(WORDS, k=count))


REPORT = words(Random("report"), 600)


@asynccontextmanager
async def scenario() -> AsyncIterator[Scenario]:
    """The fleet, without load."""
    with tempfile.TemporaryDirectory() as folder, Children() as children:
        flags = ["--port", "0", "--profile", "l4-8b", "--blocks", "2500", "--model", MODEL, "--speed", "4"]
        engines: dict[str, Child] = {
            name: children.start("engine", *flags, "--events-port", "0", "--replay-port", "0") for name in ENGINES
        }
        urls = {name: json.loads(await asyncio.to_thread(engine.first_line))["url"] for name, engine in engines.items()}
        port = free_port(21_000)
        admin_port = free_port(port + 1)
        tables = {
            "admin": {"port": admin_port, "token_sha256": sha256(TOKEN)},
            "prompts": {"remote_tokenize": True},
            "islands": [{"name": "eu-west"}, {"name": "us-east", "round_trip_ms": 3.0}],
            "nodes": [{"url": url, "name": name, "island": ENGINES[name]} for name, url in urls.items()],
            "keys": [
                {"sha256": sha256(KEYS["search"]), "tenant": "search"},
                {"sha256": sha256(KEYS["chat"]), "tenant": "chat", "max_priority": "high"},
                {"sha256": sha256(KEYS["batch"]), "tenant": "batch", "requests_per_min": 30},
                {"sha256": sha256(KEYS["reports"]), "tenant": "reports"},
            ],
            "routes": [
                {"name": "interactive", "tenant": "chat"},
                {"name": "nightly", "tenant": "batch"},
                {"name": "reports", "tenant": "reports"},
            ],
        }
        router = await start_router(children, Path(folder), port, tables)
        yield Scenario(router.url, f"http://127.0.0.1:{admin_port}", urls, Path(folder) / f"router-{port}.toml")


async def main() -> None:
    async with scenario() as running:
        print(f"{running.admin_url}/  token: {TOKEN}", flush=True)
        load = asyncio.create_task(running.send_load())
        if "--faults" in sys.argv:
            await asyncio.sleep(15)
            await running.fail_some_requests()
            await running.fail("eu-3", mode="slow", factor=4)
            await running.fail("us-2", mode="die")
            await running.send_wrong_keys(400)
            running.config.write_text(running.config.read_text() + '\n[routing]\npolicy = "pric"\n')
        await load


if __name__ == "__main__":
    asyncio.run(main())
