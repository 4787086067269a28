"""Captures of traffic that real proxies mirror: Debian's nginx, and Envoy (make test-mirrors)."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.polling import until

from warmroute import http_client
from warmroute.lab.demo.processes import Children, free_port
from warmroute.lab.load import LoadOptions, LoadRun
from warmroute.lab.workloads import parse_workload

pytestmark = pytest.mark.real

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "guides" / "capture.md"
REQUESTS = 40
CHATS = ["multi_turn_chat", "turns=3", "system_tokens=300", "message_tokens=60", "output_tokens=30", "think_s=0.2"]

NGINX = """\
daemon off; pid FOLDER/nginx.pid; error_log FOLDER/error.log;
events { worker_connections 256; }
http {
  access_log off; client_max_body_size 32m;
  client_body_temp_path FOLDER/body; proxy_temp_path FOLDER/proxy;
  fastcgi_temp_path FOLDER/fastcgi; uwsgi_temp_path FOLDER/uwsgi; scgi_temp_path FOLDER/scgi;
  upstream engines { server 127.0.0.1:ENGINE; }
  server {
    listen 127.0.0.1:PROXY;
LOCATIONS
  }
}
"""
ENVOY = """\
static_resources:
  listeners:
  - address: { socket_address: { address: 127.0.0.1, port_value: PROXY } }
    per_connection_buffer_limit_bytes: 33554432
    filter_chains:
    - filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: in
          route_config:
            virtual_hosts:
            - name: all
              domains: ["*"]
ROUTES
          http_filters:
          - name: envoy.filters.http.router
            typed_config: { "@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router }
CLUSTERS
  - name: engines
    type: STATIC
    load_assignment:
      cluster_name: engines
      endpoints: [ { lb_endpoints: [ { endpoint: { address: { socket_address: { address: 127.0.0.1, port_value: ENGINE } } } } ] } ]
"""  # noqa: E501


def guide_example(language: str) -> str:
    """Return the configuration that the guide shows."""
    return GUIDE.read_text().split(f"```{language}\n")[1].split("```")[0]


def indented(text: str, spaces: int) -> str:
    return "".join(" " * spaces + line for line in text.splitlines(keepends=True)).rstrip("\n")


@contextmanager
def proxy(kind: str, folder: Path, engine: str, capture: int) -> Iterator[int]:
    """Run a proxy in front of an engine, with the guide's configuration. Yield its port."""
    port = free_port(19_500)
    ports = {"PROXY": str(port), "ENGINE": engine.rpartition(":")[2], "FOLDER": str(folder)}
    if kind == "nginx":
        command, text = shutil.which("nginx") or "/usr/sbin/nginx", NGINX
        parts = {"LOCATIONS": indented(guide_example("nginx"), 4)}
        flags = ["-p", str(folder), "-c"]
    else:
        command, text = os.environ.get("WARMROUTE_ENVOY") or str(ROOT / ".venv-envoy" / "bin" / "envoy"), ENVOY
        routes, _, clusters = guide_example("yaml").partition("clusters:\n")
        parts = {"ROUTES": indented(routes, 14), "CLUSTERS": indented("clusters:\n" + clusters, 2)}
        flags = ["--log-level", "warning", "-c"]
    for name, value in {**parts, **ports}.items():
        text = text.replace(name, value)
    file = folder / f"{kind}.yaml"
    file.write_text(text.replace("9090", str(capture)))
    process = subprocess.Popen([command, *flags, str(file)])
    try:
        yield port
    finally:
        process.terminate()
        process.wait()


async def answers(url: str) -> bool:
    try:
        status, _ = await http_client.request("GET", f"{url}/health", timeout_s=2, limit_bytes=1 << 16)
    except OSError:
        return False
    return status == 200


@pytest.mark.parametrize("kind", ["nginx", "envoy"])
async def test_mirrored_traffic_is_captured_whole_and_clients_notice_nothing(tmp_path: Path, kind: str) -> None:
    out, listen = tmp_path / "trace.jsonl.gz", free_port(19_600)
    with Children() as children:
        engine = children.start("engine", "--port", "0", "--profile", "h200-1.5b", "--speed", "20")
        engine_url = json.loads(await asyncio.to_thread(engine.first_line))["url"]
        mirror = children.start("capture", "--listen", str(listen), "--out", str(out))
        with proxy(kind, tmp_path, engine_url, listen) as port:
            url = f"http://127.0.0.1:{port}"
            for address in (f"http://127.0.0.1:{listen}", url):
                while not await answers(address):  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
            run = await send(url)
            assert (run["finished"], run["failed"]) == (REQUESTS, 0), run["errors"]
            await asyncio.sleep(1.0)
            await asyncio.to_thread(children.end, mirror)
            rows = [json.loads(line) for line in gzip.decompress(out.read_bytes()).splitlines()]
            assert len(rows) == REQUESTS
            assert any(row.get("follows") for row in rows)
            again = await send(url)  # nobody listens at the mirror
            assert (again["finished"], again["failed"]) == (REQUESTS, 0)
        await until(lambda: not engine.has_ended())


async def send(url: str) -> dict[str, Any]:
    prompts = parse_workload(CHATS).arrivals(1, 20.0, 1, REQUESTS)
    return await LoadRun(LoadOptions(url=url, limit=REQUESTS), prompts).run()
