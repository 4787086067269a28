"""LoRA adapters: which ones a node has loaded, and what loading another one costs."""

from __future__ import annotations

from array import array

from warmroute.config import Health, NodeConfig
from warmroute.core.adapters import FleetAdapters, LoadedAdapters
from warmroute.core.fleet import Fleet
from warmroute.engines.vllm import parse_load


def test_the_least_recently_used_adapter_is_evicted() -> None:
    loaded = LoadedAdapters(FleetAdapters(100.0))
    loaded.update_running((), 2)
    for name in ("a", "b", "a", "c"):
        loaded.mark_used(name)
    assert list(loaded) == ["a", "c"] and loaded.load_count == 3


def test_adapters_that_the_engine_reports_are_loaded_until_a_restart() -> None:
    loaded = LoadedAdapters(FleetAdapters(100.0))
    loaded.update_running(("x", "y"), 2)
    assert "x" in loaded and loaded.load_count == 0
    loaded.update_running((), 0)  # none is in use now: they stay loaded
    assert "x" in loaded
    loaded.update_running((), 1)
    assert list(loaded) == ["y"]
    loaded.clear()
    assert not len(loaded)


def test_a_group_knows_the_cost_of_its_adapter_on_each_node() -> None:
    fleet = Fleet(Health())
    fleet.adapters.reconfigure(300.0)
    nodes = [fleet.add(NodeConfig(url=f"http://n{at}:1", name=f"n{at}")) for at in range(2)]
    cards: list[dict[str, object]] = [{"id": "base", "parent": None}, {"id": "ad", "parent": "base"}]
    for node in nodes:
        fleet.check_passed(node, 0.0)
        fleet.update_models(node, ["base", "ad"], cards)
    base, group = fleet.group("base"), fleet.group("ad")
    assert base is not None and base.adapter is None
    assert group is not None and group.adapter is not None

    def costs() -> list[float]:
        assert group is not None and group.adapter is not None
        return list(array("d", group.adapter.load_ms(group.up)))

    assert costs() == [300.0, 300.0]
    nodes[1].loaded_adapters.mark_used("ad")
    assert costs() == [300.0, 0.0]
    assert group.adapter.load_ms(group.up) is group.adapter.load_ms(group.up), "cached"
    fleet.adapters.reconfigure(50.0)
    assert costs() == [50.0, 0.0]
    nodes[1].loaded_adapters.clear()
    assert costs() == [50.0, 50.0]
    nodes[0].loaded_adapters.update_running(("other",), 1)
    assert costs() == [100.0, 50.0], "it evicts another one, which has to be loaded again"
    for node in nodes:
        fleet.update_models(node, ["base", "ad"], [{"id": "base"}, {"id": "ad"}])
    assert group.adapter is None


def test_vllm_reports_the_adapters_in_use_and_the_slots() -> None:
    page = (
        b"vllm:num_requests_running 1.0\n"
        b'vllm:lora_requests_info{max_lora="4",running_lora_adapters="old",waiting_lora_adapters=""} 1.7e+09\n'
        b'vllm:lora_requests_info{max_lora="4",running_lora_adapters="a,b",waiting_lora_adapters="c"} 1.8e+09\n'
        b'vllm:lora_requests_info{max_lora="4",running_lora_adapters="older",waiting_lora_adapters=""} 1.6e+09\n'
    )
    report = parse_load(page)
    assert report.adapters == ("a", "b") and report.adapter_slots == 4
    report = parse_load(b"vllm:num_requests_running 1.0\n")
    assert report.adapters == () and report.adapter_slots == 0
