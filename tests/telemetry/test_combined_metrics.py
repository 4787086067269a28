"""One metrics page for several workers."""

from __future__ import annotations

from warmroute.app.workers.combined_metrics import CombinedMetrics, parse_page


def page(requests: int, in_flight: int, kv_usage: float, engine_hits: int, buckets: tuple[int, int]) -> bytes:
    return f"""# HELP warmroute_node_requests_total Requests.
# TYPE warmroute_node_requests_total counter
warmroute_node_requests_total{{node="a b",outcome="ok"}} {requests}
warmroute_node_requests_in_flight{{node="a b"}} {in_flight}
warmroute_node_kv_usage_ratio{{node="a b"}} {kv_usage}
warmroute_node_engine_prefix_cache_hits_total{{node="a b"}} {engine_hits}
warmroute_node_time_to_first_token_seconds_bucket{{node="a b",le="0.1"}} {buckets[0]}
warmroute_node_time_to_first_token_seconds_bucket{{node="a b",le="+Inf"}} {buckets[1]}
nonsense
""".encode()


def test_counters_are_summed_and_what_all_measure_alike_counts_once() -> None:
    combined = CombinedMetrics()
    combined.update({"x": page(5, 2, 0.5, 1000, (1, 2)), "y": page(7, 1, 0.4, 900, (3, 5))}, {"x", "y"})
    text = combined.render({"warmroute_workers": 2.0})
    samples = parse_page(text)
    assert samples['warmroute_node_requests_total{node="a b",outcome="ok"}'] == 12
    assert samples['warmroute_node_requests_in_flight{node="a b"}'] == 3
    assert samples['warmroute_node_kv_usage_ratio{node="a b"}'] == 0.5
    assert samples['warmroute_node_engine_prefix_cache_hits_total{node="a b"}'] == 1000
    assert samples['warmroute_node_time_to_first_token_seconds_bucket{node="a b",le="+Inf"}'] == 7
    assert samples["warmroute_workers"] == 2
    assert b"# TYPE warmroute_node_time_to_first_token_seconds histogram" in text
    assert text.count(b"# TYPE warmroute_node_requests_total") == 1


def test_a_counter_never_falls_when_a_worker_is_replaced() -> None:
    combined, names = (
        CombinedMetrics(),
        ("warmroute_node_requests_total", "warmroute_node_engine_prefix_cache_hits_total"),
    )
    seen: list[tuple[float, ...]] = []

    def read() -> None:
        samples = parse_page(combined.render({}))
        seen.append(tuple(next(v for k, v in samples.items() if k.startswith(name)) for name in names))

    combined.update({"x": page(5, 2, 0.5, 1000, (1, 2)), "y": page(7, 1, 0.4, 900, (3, 5))}, {"x", "y"})
    read()
    combined.update({"y": page(8, 1, 0.4, 950, (3, 5))}, {"y"})  # x has ended
    read()
    combined.update({"y": page(9, 1, 0.4, 960, (3, 5)), "z": page(1, 0, 0.4, 10, (0, 0))}, {"y", "z"})
    read()
    combined.update({"z": page(2, 0, 0.4, 30, (0, 0))}, {"z"})
    read()
    assert seen == [(12, 1000), (13, 1000), (15, 1010), (16, 1010)]
