"""GET /admin/live and the files of the live page."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import json
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.engine_scripts import http_response, normal, script
from support.polling import until
from support.raw_client import RawConnection, chat, post
from support.running_router import RunningRouter, router
from support.scripted_engine import engines
from support.serve_process import serve

from warmroute.app import live_page
from warmroute.app.alerts import Alert
from warmroute.app.live_page import FOLDER, PAGE_PATHS
from warmroute.core.health import HealthState
from warmroute.lab.html_report import theme_css

ROOT = Path(__file__).resolve().parents[2]
TOKEN = {"token_sha256": hashlib.sha256(b"open sesame").hexdigest()}
LONG = "the router sends each request where it costs the least " * 200
USAGE = json.dumps(
    {
        "choices": [],
        "usage": {"prompt_tokens": 2100, "completion_tokens": 17, "prompt_tokens_details": {"cached_tokens": 1984}},
    }
).encode()
SECTIONS = {
    "router", "totals", "window", "nodes", "islands", "routes", "queue", "prefixes", "scaling", "prompts", "alerts",
    "ended_alerts", "client_errors", "failed_requests", "tenants",
}  # fmt: skip


class Viewer:
    """A client of the feed."""

    def __init__(self, peer: RawConnection) -> None:
        self.peer = peer
        self.status = 0
        self._text = ""

    async def open(self, *headers: str) -> Viewer:
        lines = ["GET /admin/live HTTP/1.1", "Host: 127.0.0.1", *headers]
        self.peer.write("\r\n".join(lines).encode() + b"\r\n\r\n")
        self.head = await self.peer.head()
        self.status = self.head.status
        return self

    async def next(self) -> tuple[str, dict[str, Any]]:
        """Return the name and the data of the next event."""
        async with asyncio.timeout(10):
            while "\n\n" not in self._text:
                size = int((await self.peer.reader.readuntil(b"\r\n"))[:-2], 16)
                self._text += (await self.peer.reader.readexactly(size + 2))[:-2].decode()
        event, _, self._text = self._text.partition("\n\n")
        name, data = event.split("\n")
        return name.removeprefix("event: "), json.loads(data.removeprefix("data: "))


async def viewer(r: RunningRouter, *headers: str) -> Viewer:
    return await Viewer(await r.connect(r.service.admin_port)).open(*headers)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_page, "INTERVAL_S", 0.05)


# The feed.


async def test_a_viewer_gets_a_snapshot_and_then_what_changes() -> None:
    async with engines(2) as both, router(*both, routing={"policy": "price", "seed": 7}) as r:
        for engine in both:
            engine.behave = normal(USAGE)
        for _ in range(3):
            await r.request(post(chat(LONG, stream=True)))
        watching = await viewer(r)
        assert watching.status == 200
        assert watching.head.get("content-type") == "text/event-stream; charset=utf-8"
        assert watching.head.get("cache-control") == "no-store"
        name, data = await watching.next()
        assert name == "snapshot" and set(data) == SECTIONS | {"history", "decisions"}
        assert [node["name"] for node in data["nodes"]] == ["node0", "node1"]
        assert data["router"]["policy"] == "price" and data["router"]["models"] == ["m"]
        assert data["totals"]["requests"] == 3 and data["totals"]["cached_tokens"] == 3 * 1984
        assert data["totals"]["saved_s"] >= 0 and data["totals"]["output_tokens"] == 51
        [route] = data["routes"]
        assert (route["model"], route["requests"]) == ("m", 3) and route["hit_ratio"] == pytest.approx(0.945, abs=0.01)
        assert len(data["decisions"]) == 3 and data["decisions"][0]["candidates"]
        assert len(data["history"]["fields"]) == 19
        await r.admin("POST", "/admin/nodes/node0/drain")
        while True:
            name, data = await watching.next()
            assert name == "update"
            if "nodes" in data:
                break
        assert data["nodes"][0]["state"] == "draining"
        assert "router" not in data and "scaling" not in data, "sections that did not change are left out"


async def test_responses_that_are_not_streamed_have_times_and_tenants_are_counted() -> None:
    keys = [{"sha256": hashlib.sha256(name.encode()).hexdigest(), "tenant": name} for name in ("search", "chat")]
    usage = {"prompt_tokens": 2100, "completion_tokens": 17, "prompt_tokens_details": {"cached_tokens": 1984}}
    async with engines(1) as [engine], router(engine, keys=keys, routing={"policy": "price"}) as r:
        engine.behave = script(http_response(json.dumps({"choices": [], "usage": usage}).encode()))
        for tenant in ("search", "search", "chat"):
            body = chat(LONG)
            assert (await r.request(post(body, headers=[f"Authorization: Bearer {tenant}"]))).status == 200
        _name, data = await (await viewer(r)).next()
        [route] = data["routes"]
        for sums in (route, data["window"], data["totals"]):
            assert sums["ttft_p50_ms"] is None and sums["token_p50_ms"] is None
            assert 0.0 < sums["duration_p50_ms"] <= sums["duration_p90_ms"] and sums["token_at_most_ms"] > 0.0
        assert data["tenants"]["count"] == 2
        assert data["tenants"]["rows"] == [
            {
                "tenant": name,
                "requests": n,
                "prompt_tokens": 2100 * n,
                "cached_tokens": 1984 * n,
                "output_tokens": 17 * n,
            }
            for name, n in (("search", 2), ("chat", 1))
        ]


async def test_an_engine_that_reports_fewer_prompt_tokens_limits_the_round_robin_estimate() -> None:
    """It was 2757 % for an engine that reports prompts as 76 times shorter than they are."""
    usage = {"prompt_tokens": 11, "completion_tokens": 2}
    async with engines(2) as both, router(*both, routing={"policy": "price", "seed": 7}) as r:
        for engine in both:
            engine.behave = normal(json.dumps({"choices": [], "usage": usage}).encode())
        for _ in range(6):
            await r.request(post(chat(LONG, stream=True)))
        _name, data = await (await viewer(r)).next()
        window = data["window"]
        assert window["prompt_tokens"] == 66 and 0.0 < window["round_robin_hit_ratio"] <= 1.0
        assert window["hit_ratio"] <= 1.0 and window["predicted_tokens"] <= 66 and window["short_reports"] >= 4


async def test_the_feed_says_what_the_last_reload_changed_and_why_one_failed(tmp_path: Path) -> None:
    file = tmp_path / "w.toml"
    async with engines(1) as [engine]:
        text = f'[[nodes]]\nurl = "{engine.url}"\nname = "gpu-a"\n[listen]\nport = 0\n[admin]\nport = 0\n'
        file.write_text(text)
        async with serve("--config", file) as process:
            r = RawConnection(*await asyncio.open_connection("127.0.0.1", process.admin_port, limit=1 << 24))
            watching = await Viewer(r).open()
            sections: dict[str, Any] = {}

            async def seen(holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
                """Follow the feed until it shows this of the last reload and of the alerts. Return the last reload."""
                async with asyncio.timeout(60):
                    while not (sections and holds(sections)):
                        sections.update((await watching.next())[1])
                return dict(sections["router"]["last_reload"] or {})

            assert await seen(lambda data: data["router"]["last_reload"] is None) == {}
            file.write_text(text + "[routing]\npolicy = 'session'\n")
            process.signal(signal.SIGHUP)
            done = await seen(lambda data: data["router"]["last_reload"] is not None)
            assert done["error"] is None and any("routing" in one for one in done["changed"]), done
            assert done["time"] == pytest.approx(time.time(), abs=60) and done["needs_restart"] == []
            file.write_text(text + "[routing]\npolicy = 'pric'\n")
            process.signal(signal.SIGHUP)
            failed = await seen(lambda data: any(alert["id"] == "config_rejected" for alert in data["alerts"]))
            assert "pric" in failed["error"] and failed["changed"] == []
            file.write_text(text)
            process.signal(signal.SIGHUP)
            mended = await seen(lambda data: data["alerts"] == [])
            assert mended["error"] is None and mended["time"] >= failed["time"]


async def test_hot_prefixes_name_no_node_that_is_down() -> None:
    async with engines(2) as both, router(*both, routing={"policy": "price", "seed": 7}) as r:
        for _ in range(6):
            await r.request(post(chat(LONG, stream=True)))
            r.service.traffic.prefixes.next_sample_s = -1e9
        snapshot, prefixes = r.service.live_feed._snapshot, r.service.traffic.prefixes
        holders = r.service.cache_view.holders

        def cached_on() -> set[str]:
            prefixes._refresh_s = -1e9
            described: Any = snapshot.sections(snapshot.read_on_loop())["prefixes"]
            return {name for prefix in described for name in prefix["holders"]}

        before = cached_on()
        assert before
        for name in before:
            r.service.fleet.check_failed(r.service.fleet.node(name), r.service.proxy.now(), "connection refused")
        assert any(holders(prefix.chain) for prefix in prefixes.popular(0.0)), "the router still knows its cache"
        assert cached_on() == set()


async def test_new_decisions_reach_the_viewer_once() -> None:
    async with engines() as [engine], router(engine) as r:
        watching = await viewer(r)
        await watching.next()
        ids = [f"r{number}" for number in range(3)]
        seen: list[str] = []
        for request_id in ids:
            await r.request(post(headers=[f"X-Request-Id: {request_id}"]))
            while request_id not in seen:
                seen += [one["request_id"] for one in (await watching.next())[1].get("decisions", ())]
        for _ in range(3):
            seen += [one["request_id"] for one in (await watching.next())[1].get("decisions", ())]
        assert seen == ids


async def test_of_many_decisions_the_viewer_gets_a_few() -> None:
    async with engines() as [engine], router(engine) as r:
        for _ in range(20):
            await r.request()
        entries = r.service.live_feed._snapshot.ended_since(-1e9, 4)
        assert len(entries) == 4 and len(set(map(id, entries))) == 4
        assert r.service.live_feed._snapshot.ended_since(1e9, 4) == []


async def test_nothing_is_rendered_without_viewers() -> None:
    async with engines() as [engine], router(engine) as r:
        feed = r.service.live_feed
        watching = await viewer(r)
        await watching.next()
        assert feed.viewers == 1 and feed._task is not None
        watching.peer.disconnect()
        await until(lambda: feed.viewers == 0)
        assert feed._task is None


async def test_the_number_of_viewers_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_page, "MAX_VIEWERS", 2)
    async with engines() as [engine], router(engine) as r:
        first, _second = await viewer(r), await viewer(r)
        refused = await r.admin("GET", "/admin/live")
        assert refused.status == 503 and refused.error["code"] == "too_many_viewers"
        assert refused.get("retry-after") == "10"
        first.peer.disconnect()
        await until(lambda: r.service.live_feed.viewers == 1)
        assert (await viewer(r)).status == 200


async def test_a_viewer_that_does_not_read_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_page, "MAX_UNREAD_BYTES", 200_000)
    async with engines() as [engine], router(engine) as r:
        large = [Alert(id="a", severity="info", title="x" * 1_000_000, cause="", what_to_do="")]
        slow, reading = await viewer(r), await viewer(r)
        slow.peer.writer.transport.pause_reading()  # type: ignore[attr-defined]
        feed = r.service.live_feed

        async def read() -> None:
            while True:
                await reading.next()

        reader = asyncio.create_task(read())
        for number in range(200):
            r.service.alerts.current = (Alert(**{**_fields(large[0]), "id": f"a{number}"}),)
            await feed.send_update()
            await asyncio.sleep(0.005)
            if feed.viewers == 1:
                break
        assert feed.viewers == 1, "the slow viewer is gone, the other one stays"
        reader.cancel()
        r.service.alerts.current = ()


async def test_the_list_of_alerts_has_active_ones_and_those_that_ended() -> None:
    async with engines() as [engine], router(engine) as r:
        began_s = time.time()
        healthy, engine.health = engine.health, script(http_response(b"", 503))
        await until(lambda: r.node(0).health.state is HealthState.DOWN)
        r.service.alerts.update(time.monotonic())
        found = json.loads((await r.admin("GET", "/admin/alerts")).body)["alerts"]
        assert [(alert["name"], alert["ended"]) for alert in found] == [("no_node", None), ("node_down", None)]
        assert began_s - 1 <= found[0]["since"] <= time.time() + 1
        assert found[1]["nodes"] == ["node0"] and "503" in found[1]["cause"] and found[1]["what_to_do"]
        assert found[1]["count"] == 0 and found[1]["source"] == "" and found[1]["sources"] == []
        engine.health = healthy
        await until(lambda: r.node(0).health.state is HealthState.UP)
        r.service.alerts.update(time.monotonic())
        found = json.loads((await r.admin("GET", "/admin/alerts")).body)["alerts"]
        assert [alert["name"] for alert in found] == ["no_node", "node_down"]
        assert all(alert["since"] <= alert["ended"] <= time.time() + 1 for alert in found)
        _, snapshot = await (await viewer(r)).next()
        assert snapshot["alerts"] == [] and snapshot["ended_alerts"] == found
        assert (await r.admin("POST", "/admin/alerts")).status == 405


def _fields(alert: Alert) -> dict[str, Any]:
    return {name: getattr(alert, name) for name in alert.__struct_fields__}


async def test_a_viewer_that_leaves_while_its_snapshot_is_rendered_costs_the_others_nothing() -> None:
    async with engines() as [engine], router(engine) as r:
        staying = await viewer(r)
        await staying.next()
        for _ in range(5):
            leaving = await r.connect(r.service.admin_port)
            leaving.write(b"GET /admin/live HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            await asyncio.sleep(0.001)
            leaving.disconnect()
        await until(lambda: r.service.live_feed.viewers == 1)
        await r.admin("POST", "/admin/nodes/node0/drain")
        while "nodes" not in (await staying.next())[1]:
            pass


async def test_names_that_clients_choose_do_not_reach_the_feed() -> None:
    """Tenants, models and routes come from the configuration and the nodes; prompts never appear."""
    async with engines() as [engine], router(engine, routing={"policy": "price"}) as r:
        engine.behave = normal(USAGE)
        await r.request(post(chat("xyzzy-plugh " * 700, model="unknown-model")))
        await r.request(post(chat("xyzzy-plugh " * 700)))
        _, data = await (await viewer(r)).next()
        text = json.dumps(data)
        assert "xyzzy" not in text and "unknown-model" not in text


async def test_queue_rows_name_priority_tenant_and_reasons() -> None:
    keys = [{"sha256": hashlib.sha256(b"k").hexdigest(), "tenant": "batch", "requests_per_min": 1}]
    async with engines() as [engine], router(engine, keys=keys) as r:
        for _ in range(3):
            await r.request(post(headers=["Authorization: Bearer k"]))
        _, data = await (await viewer(r)).next()
        [row] = data["queue"]["rows"]
        assert row["tenant"] == "batch" and row["priority"] == "normal" and row["rejected"] == 2
        assert row["reasons"] == {"requests_per_min": 2}


# Access.


async def test_the_feed_requires_the_token_and_the_page_does_not() -> None:
    async with engines() as [engine], router(engine, admin=TOKEN) as r:
        assert (await viewer(r)).status == 401
        assert (await viewer(r, "Authorization: Bearer wrong")).status == 401
        assert (await viewer(r, "Authorization: Bearer open sesame")).status == 200
        for path in PAGE_PATHS:
            assert (await r.admin("GET", path.decode())).status == 200
        assert (await r.admin("GET", "/?token=open%20sesame")).status == 401


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (("Origin: http://127.0.0.1",), 200),
        (("Origin: http://127.0.0.1:3000",), 403),
        (("Origin: https://evil.example",), 403),
        (("Origin: null",), 403),
        (("Sec-Fetch-Site: cross-site",), 403),
        (("Sec-Fetch-Site: same-site",), 403),
        (("Sec-Fetch-Site: same-origin",), 200),
    ],
)
async def test_without_a_token_only_the_live_page_itself_may_drain(headers: tuple[str, ...], status: int) -> None:
    async with engines() as [engine], router(engine) as r:
        assert (await r.admin("POST", "/admin/nodes/node0/drain", b"", *headers)).status == status


# The page.


async def test_the_page_allows_nothing_from_elsewhere_and_no_inline_code() -> None:
    async with engines() as [engine], router(engine) as r:
        page = await r.admin("GET", "/")
        assert page.get("content-type") == "text/html; charset=utf-8"
        policy = page.get("content-security-policy") or ""
        assert policy.startswith("default-src 'none'") and "unsafe" not in policy and "frame-ancestors 'none'" in policy
        assert page.get("x-content-type-options") == "nosniff" and page.get("referrer-policy") == "no-referrer"
        html = page.body.decode()
        assert not re.search(r"<script(?![^>]*\ssrc=)|<style|\sstyle=|\son\w+=", html)
        linked = re.findall(r'(?:src|href)="([^"#]+)"', html)
        assert linked and {path.encode() for path in linked} <= set(PAGE_PATHS)


async def test_files_are_compressed_for_browsers_that_accept_it() -> None:
    async with engines() as [engine], router(engine) as r:
        plain = await r.admin("GET", "/page/app.js")
        packed = await r.admin("GET", "/page/app.js", b"", "Accept-Encoding: gzip, br")
        assert packed.get("content-encoding") == "gzip" and gzip.decompress(packed.body) == plain.body
        assert (await r.admin("GET", "/page/other.js")).status == 404


def test_the_committed_build_belongs_to_its_sources() -> None:
    assert runpy.run_path(str(ROOT / "tools" / "check_page.py"))["main"]() == 0


def test_the_check_notices_a_changed_source(tmp_path: Path) -> None:
    for name in ("ui/src", "ui/public", "src/warmroute/app/page"):
        shutil.copytree(ROOT / name, tmp_path / name)
    sources = ("index.html", "package.json", "package-lock.json", "tsconfig.json", "vite.config.ts")
    for name in (*(f"ui/{source}" for source in sources), "src/warmroute/theme.css"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "tools").mkdir()
    check = shutil.copy(ROOT / "tools" / "check_page.py", tmp_path / "tools")
    assert subprocess.run([sys.executable, check], capture_output=True).returncode == 0
    (tmp_path / "ui" / "src" / "main.ts").write_text("// changed")
    found = subprocess.run([sys.executable, check], capture_output=True, text=True)
    assert found.returncode == 1 and "run `make page`" in found.stdout


def test_the_report_of_replay_has_the_same_palette() -> None:
    assert "--c7: light-dark(" in theme_css()
    built = (FOLDER / "app.css").read_text()
    for colour in re.findall(r"--c\d: light-dark\((#\w+),", theme_css()):
        assert colour in built or f"#{colour[1::2]}" in built


def test_the_page_names_no_other_server() -> None:
    for file in FOLDER.iterdir():
        found = re.findall(rb"https?://(?!www\.w3\.org/)[\w.-]+", file.read_bytes())
        assert not found, f"{file.name}: {found}"


def test_the_page_is_small() -> None:
    size = sum(len(gzip.compress(file.read_bytes())) for file in FOLDER.iterdir())
    assert size < 150_000
