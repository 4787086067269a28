"""The picker's metrics under the names of the Inference Extension. Only the picker has them."""

from __future__ import annotations

import asyncio

from support.picker import picker
from support.running_router import router
from support.scripted_engine import engines


async def _page(admin_port: int) -> str:
    reader, writer = await asyncio.open_connection("127.0.0.1", admin_port)
    writer.write(b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
    page = await reader.read()
    writer.close()
    return page.decode()


async def test_the_extensions_names_are_on_the_pickers_page_and_not_on_the_proxys() -> None:
    async with engines(2) as nodes:
        async with picker(*nodes) as p:
            page = await _page(p.service.admin_port)
            for line in (
                'inference_pool_ready_pods{name="default"} 2', 'inference_pool_average_queue_size{name="default"} ',
                'inference_pool_average_running_requests{name="default"} ',
                'inference_pool_average_kv_cache_utilization{name="default"} ',
                'inference_objective_running_requests{model_name="m"} 0',
                'inference_extension_flow_control_queue_size{inference_pool="default"} 0',
            ):  # fmt: skip
                assert f"\n{line}" in page
        async with router(*nodes) as r:
            assert "\ninference_" not in await _page(r.service.admin_port)
