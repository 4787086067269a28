"""The alert rules and the dashboard with a real Prometheus: promtool, and a server that scrapes a running router."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from alert_cases import CASES, broken, errors, promtool_tests, responses
from support.engine_scripts import DONE, SSE_HEAD, chunk, http_response, script, sse_event
from support.polling import until
from support.raw_client import chat, post
from support.running_router import RunningRouter, router
from support.scripted_engine import ScriptedEngine, engines

from warmroute.edge.arrival import hash_key

ROOT = Path(__file__).resolve().parents[2]
RULES_FILE = ROOT / "deploy/prometheus/alerts.yaml"
RULES: dict[str, Any] = {rule["alert"]: rule for rule in yaml.safe_load(RULES_FILE.read_text())["groups"][0]["rules"]}
DASHBOARD: dict[str, Any] = json.loads((ROOT / "deploy/grafana/warmroute.json").read_text())
NO_DATA = {
    "Conversations that left their island", "Traces", "Hit rate and its baseline", "Drops by likely cause", "GPUs lost",
    "Nodes", "Changes", "Utilisation and cost",
}  # fmt: skip
"""Panels of a fleet on several islands, or that is scaled or traced, or whose hit rate dropped."""


def test_every_rule_has_unit_tests() -> None:
    assert {case.alert for case in CASES} == set(RULES)


def tool(name: str) -> str:
    found = shutil.which(name)
    assert found is not None, f"{name} is missing: apt-get install prometheus"
    return found


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.promtool
def test_promtool_accepts_the_rules() -> None:
    run(tool("promtool"), "check", "rules", str(RULES_FILE))


@pytest.mark.promtool
def test_each_rule_fires_when_it_should_and_only_then(tmp_path: Path) -> None:
    file = tmp_path / "tests.yaml"
    file.write_text(yaml.safe_dump(promtool_tests(str(RULES_FILE), RULES), allow_unicode=True))
    run(tool("promtool"), "test", "rules", str(file))


@pytest.mark.promtool
def test_the_error_budget_is_that_of_thirty_days(tmp_path: Path) -> None:
    """Of 1,000 requests an hour one may fail. One does for 25 days, then three do for 15 days."""
    hours, bad_hours = 25 * 24, 15 * 24
    failed = f"0+1x{hours} {hours + 3}+3x{bad_hours - 1} {hours + 3 * bad_hours}+0x{35 * 24}"
    series = responses(f"0+999x{80 * 24}") | errors(failed) | broken(f"0x{80 * 24}")
    rule = RULES["WarmrouteErrorBudgetSpent"]
    fires = {
        "exp_labels": {"severity": rule["labels"]["severity"], "job": "w", "objective": "availability"},
        "exp_annotations": {
            "summary": "The error budget of 30 days is spent (availability  )",
            "description": rule["annotations"]["description"],
        },
    }
    times: tuple[tuple[int, list[Any]], ...] = ((20, []), (38, [fires]), (50, [fires]), (62, []), (74, []))
    test = {
        "interval": "1h",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "alert_rule_test": [
            {"eval_time": f"{day}d", "alertname": rule["alert"], "exp_alerts": alerts} for day, alerts in times
        ],
    }
    file = tmp_path / "budget.yaml"
    file.write_text(yaml.safe_dump({"rule_files": [str(RULES_FILE)], "evaluation_interval": "6h", "tests": [test]}))
    run(tool("promtool"), "test", "rules", str(file))


@pytest.mark.promtool
def test_promtool_accepts_the_metrics_page_and_the_scrape_configuration() -> None:
    run(tool("promtool"), "check", "config", "--syntax-only", str(ROOT / "deploy/prometheus/prometheus.yaml"))

    async def page() -> bytes:
        async with engines() as [engine], router(engine) as r:
            await r.request()
            return (await r.admin("GET", "/metrics")).body

    checked = subprocess.run([tool("promtool"), "check", "metrics"], input=asyncio.run(page()), capture_output=True)
    assert checked.returncode in (0, 3), checked.stderr.decode()  # 3: advice of its linter
    advice = [line for line in checked.stderr.decode().splitlines() if "warmroute_" in line]
    assert not advice, advice


# A real server.


class Prometheus:
    def __init__(self, folder: Path, admin_port: int) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        config = {
            "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(RULES_FILE)],
            "scrape_configs": [{"job_name": "warmroute", "static_configs": [{"targets": [f"127.0.0.1:{admin_port}"]}]}],
        }
        file = folder / "prometheus.yaml"
        file.write_text(yaml.safe_dump(config))
        command = [
            tool("prometheus"), f"--config.file={file}", f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{self.port}", "--log.level=warn",
        ]  # fmt: skip
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(10)

    async def get(self, path: str, **parameters: str) -> Any:
        url = f"http://127.0.0.1:{self.port}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"

        def fetch() -> Any:
            with urllib.request.urlopen(url, timeout=10) as response:
                return json.load(response)["data"]

        try:
            return await asyncio.to_thread(fetch)
        except ConnectionError:  # it starts
            return None
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{parameters}: {error.read().decode()}") from None
        except OSError:
            return None


def answer(number: int) -> list[bytes | float]:
    usage = {"prompt_tokens": 2000, "completion_tokens": 20, "prompt_tokens_details": {"cached_tokens": 1500}}
    last = b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n"
    return [SSE_HEAD, chunk(sse_event(number)), 0.02, chunk(last), DONE]


def counting_metrics(totals: Iterator[int]) -> Any:
    async def metrics(_engine: ScriptedEngine, _received: Any, writer: asyncio.StreamWriter) -> None:
        total = next(totals)
        page = (
            f'vllm:num_requests_running{{engine="0"}} 1\nvllm:num_requests_waiting{{engine="0"}} 0\n'
            f'vllm:kv_cache_usage_perc{{engine="0"}} 0.5\nvllm:prefix_cache_queries_total {100 * total}\n'
            f"vllm:prefix_cache_hits_total {60 * total}\nvllm:num_preemptions_total {total}\n"
        )
        writer.write(http_response(page.encode(), content_type=b"text/plain"))

    return metrics


async def load(r: RunningRouter) -> None:
    """Requests of two tenants, of which one is over its limit, and a client that sends nonsense."""
    for number in count(1):
        key = ["Authorization: Bearer " + ("a" if number % 4 else "b")]
        body = chat(content=f"{'word ' * 500} {number % 3}", stream=True)
        await r.request(post(body, headers=key))
        if not number % 5:
            await r.request(post(b"{", headers=key))
        await asyncio.sleep(0.02)


@pytest.mark.promtool
async def test_a_prometheus_scrapes_a_router_and_every_panel_has_data(tmp_path: Path) -> None:
    keys = [
        {"sha256": hash_key("a"), "tenant": 'se"arch'},
        {"sha256": hash_key("b"), "tenant": "batch", "requests_per_min": 2},
    ]
    tables: dict[str, Any] = {"routing": {"policy": "price"}, "keys": keys, "routes": [{"name": "chat", "model": "m"}]}
    async with engines(3) as [one, two, gone], router(one, two, gone, check_leaks=False, **tables) as r:
        for engine in (one, two):
            engine.metrics = counting_metrics(count())
            engine.behave = script(*answer(0))
        await gone.close()
        prometheus = Prometheus(tmp_path, r.service.admin_port)
        requests = asyncio.create_task(load(r))
        try:
            for _ in range(30):  # a busy machine may take longer than the few seconds that two scrapes need
                await asyncio.sleep(2.0)
                empty = await panels_without_data(prometheus)
                if empty.keys() <= NO_DATA:
                    break
            assert empty.keys() <= NO_DATA, {title: query for title, query in empty.items() if title not in NO_DATA}
            [target] = (await prometheus.get("targets"))["activeTargets"]
            assert target["health"] == "up" and not target["lastError"]
            [sample] = (await prometheus.get("query", query="up"))["result"]
            assert sample["value"][1] == "1"
            for variable in ("job", "model", "route"):
                assert await prometheus.get(f"label/{variable}/values")
            rules = await prometheus.get("rules")
            states = {rule["name"]: rule for rule in rules["groups"][0]["rules"]}
            assert all(rule["health"] == "ok" for rule in states.values()), rules
            assert states["WarmrouteNodeDown"]["state"] in ("pending", "firing")
        finally:
            requests.cancel()
            prometheus.stop()
        await until(lambda: r.inflight() == 0)


async def panels_without_data(prometheus: Prometheus) -> dict[str, str]:
    """Return title and query of the panels that would be empty."""
    empty = {}
    for panel in DASHBOARD["panels"]:
        for query in panel.get("targets", ()):
            found = await prometheus.get("query", query=filled_in(query["expr"]))
            if not found or not found["result"]:
                empty[panel["title"]] = query["expr"]
    return empty


def filled_in(query: str) -> str:
    """Return the query as Grafana sends it, with all jobs, models and routes."""
    query = query.replace("$__rate_interval", "10s")
    for variable in ("job", "model", "route"):
        query = query.replace(f"${variable}", ".*")
    return query
