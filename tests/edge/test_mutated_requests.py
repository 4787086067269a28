"""A short run of bench/mutated_requests.py: no engine reads a request that the router did not judge."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import uvicorn
from mutated_requests import Comparison, send_cases
from mutation_servers import Record, engine_server, record_judgements, router_table
from request_mutations import case
from support.polling import until
from support.running_router import router

from warmroute.config import from_table
from warmroute.edge.proxy import Proxy


class MemoryRecord:
    def __init__(self) -> None:
        self._records: list[Any] = []

    def write(self, *values: Any) -> None:
        self._records.append(list(values))

    def read(self) -> list[Any]:
        records, self._records = self._records, []
        return records


@contextmanager
def engine(http: str, record: Record) -> Iterator[uvicorn.Server]:
    """uvicorn in a thread."""
    server = engine_server(http, record)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.should_exit = server.force_exit = True
        thread.join()


async def address_of(server: uvicorn.Server) -> str:
    await until(lambda: server.started)
    return f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"


@pytest.mark.interpreted
@pytest.mark.parametrize("seed", [1, 2])
async def test_no_engine_reads_a_request_that_the_router_did_not_judge(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Proxy, "begin", Proxy.begin)  # restores it at the end
    judged, by_httptools, by_h11 = MemoryRecord(), MemoryRecord(), MemoryRecord()
    record_judgements(judged)
    statuses: Counter[str] = Counter()
    with engine("httptools", by_httptools) as one, engine("h11", by_h11) as other:
        table = router_table([await address_of(one), await address_of(other)])
        async with router({}, {}, config=from_table(table, experiment=True), check_leaks=False) as r:
            await send_cases(r.port, [case(seed, number) for number in range(250)], statuses)
            comparison = Comparison(judged, {"httptools": by_httptools, "h11": by_h11})
            assert await comparison.compare() == []
            await asyncio.sleep(0)
    assert comparison.counts["judged"] > 50
    assert min(comparison.counts["httptools"], comparison.counts["h11"]) > 20
    assert statuses["400"] > 100


async def test_the_comparison_finds_differences() -> None:
    good = ["id", "POST", "/v1/chat/completions", "", "hash", ["m", False, None, 0]]
    for change in (
        {0: "other"}, {1: "GET"}, {2: "/v1/completions"}, {3: "a=b"}, {4: "other"}, {5: ["n", False, None, 0]},
        {5: ["m", True, None, 0]}, {5: ["m", False, 7, 0]}, {5: ["m", False, None, 1]}, {6: ["content-encoding"]},
        {2: "/v1/load_lora_adapter"}, {2: "/metrics"}, {},
    ):  # fmt: skip
        judged, seen = MemoryRecord(), MemoryRecord()
        judged.write(*good, False, "normal")
        values = [*good, []]
        for at, value in change.items():
            values[at] = value
        seen.write(*values)
        problems = await Comparison(judged, {"h11": seen}).compare()
        assert len(problems) == bool(change), change
        seen.write(*good, [])
    judged.write(*good[:5], ["m", False, None, -1], False, "normal")
    seen.write(*good[:5], ["m", False, None, -1], [])
    assert await Comparison(judged, {"h11": seen}).compare(), "the key does not allow a negative priority"
