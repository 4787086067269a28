"""Adapters: what a node has loaded, and what loading another one costs."""

from __future__ import annotations

from array import array

from warmroute.config import Health, NodeConfig
from warmroute.engines.vllm import read_load
from warmroute.fleet.adapters import Adapters, Loaded
from warmroute.fleet.fleet import Fleet


def test_the_least_recently_used_one_makes_room() -> None:
    loaded = Loaded(Adapters(100.0))
    loaded.running((), 2)
    for name in ("a", "b", "a", "c"):
        loaded.used(name)
    assert list(loaded) == ["a", "c"] and loaded.loads == 3


def test_what_runs_by_others_is_loaded_too_and_a_restart_forgets_it() -> None:
    loaded = Loaded(Adapters(100.0))
    loaded.running(("x", "y"), 2)
    assert "x" in loaded and loaded.loads == 0
    loaded.running((), 0)  # nothing runs now: it stays loaded
    assert "x" in loaded
    loaded.running((), 1)
    assert list(loaded) == ["y"]
    loaded.forget()
    assert not len(loaded)


def test_a_group_knows_whether_its_model_is_an_adapter_and_what_it_costs_where() -> None:
    fleet = Fleet(Health())
    fleet.adapters.reconfigure(300.0)
    nodes = [fleet.add(NodeConfig(url=f"http://n{at}:1", name=f"n{at}")) for at in range(2)]
    cards: list[dict[str, object]] = [{"id": "base", "parent": None}, {"id": "ad", "parent": "base"}]
    for node in nodes:
        fleet.check_passed(node, 0.0)
        fleet.saw_models(node, ["base", "ad"], cards)
    base, group = fleet.group("base"), fleet.group("ad")
    assert base is not None and base.adapter is None
    assert group is not None and group.adapter is not None

    def costs() -> list[float]:
        assert group is not None and group.adapter is not None
        return list(array("d", group.adapter.load_ms(group.up)))

    assert costs() == [300.0, 300.0]
    nodes[1].loaded.used("ad")
    assert costs() == [300.0, 0.0]
    assert group.adapter.load_ms(group.up) is group.adapter.load_ms(group.up), "worked out once"
    fleet.adapters.reconfigure(50.0)
    assert costs() == [50.0, 0.0]
    nodes[1].loaded.forget()
    assert costs() == [50.0, 50.0]
    nodes[0].loaded.running(("other",), 1)
    assert costs() == [100.0, 50.0], "there, another one would have to be loaded again"
    for node in nodes:
        fleet.saw_models(node, ["base", "ad"], [{"id": "base"}, {"id": "ad"}])
    assert group.adapter is None


def test_vllm_tells_which_adapters_run_now_and_how_many_fit() -> None:
    page = (
        b"vllm:num_requests_running 1.0\n"
        b'vllm:lora_requests_info{max_lora="4",running_lora_adapters="old",waiting_lora_adapters=""} 1.7e+09\n'
        b'vllm:lora_requests_info{max_lora="4",running_lora_adapters="a,b",waiting_lora_adapters="c"} 1.8e+09\n'
        b'vllm:lora_requests_info{max_lora="4",running_lora_adapters="older",waiting_lora_adapters=""} 1.6e+09\n'
    )
    report = read_load(page)
    assert report.adapters == ("a", "b") and report.adapter_slots == 4
    report = read_load(b"vllm:num_requests_running 1.0\n")
    assert report.adapters == () and report.adapter_slots == 0
