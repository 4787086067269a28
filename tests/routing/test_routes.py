"""Routes: which requests they match, and which settings they change."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from routing_harness import RoutingHarness, prompt
from support.cpu_limit import cpu_limit

from warmroute.config import Admission as AdmissionConfig
from warmroute.config import ConfigError, Pricing, RouteConfig, Routing, from_table
from warmroute.config.routing import HIGH, LOW, NORMAL, Routes
from warmroute.core.messages import RoutingRequest

CHAT = "/v1/chat/completions"


def picked(*routes: RouteConfig, model: str = "m", path: str = CHAT, tenant: str = "", **headers: str) -> str | None:
    fields = {name.replace("_", "-").encode(): value.encode() for name, value in headers.items()}
    route = Routes(routes).pick(model, path, tenant, lambda name: fields.get(name, b""))
    return route.name if route is not None else None


@pytest.mark.parametrize(
    ("route", "request_", "matches"),
    [
        ({}, {}, True),
        ({"model": "m"}, {}, True),
        ({"model": "m"}, {"model": "m2"}, False),
        ({"model": "qwen3-*"}, {"model": "qwen3-32b"}, True),
        ({"model": "qwen3-*"}, {"model": "my/qwen3-32b"}, False),
        ({"model": "*qwen*b"}, {"model": "my/qwen3-32b"}, True),
        ({"model": "a.c"}, {"model": "abc"}, False),
        ({"model": "a[bc]*"}, {"model": "a[bc]d"}, True),
        ({"path": "/v1/embeddings"}, {}, False),
        ({"path": "/v1/chat/*"}, {}, True),
        ({"tenant": "search"}, {"tenant": "search"}, True),
        ({"tenant": "team-*"}, {"tenant": ""}, False),
        ({"tenant": "team-*"}, {"tenant": "team-x"}, True),
        ({"header": "X-Batch"}, {"x_batch": "anything"}, True),
        ({"header": "X-Batch"}, {}, False),
        ({"header": "x-class=agent"}, {"x_class": "agent"}, True),
        ({"header": "x-class=agent*"}, {"x_class": "agent=7"}, True),
        ({"header": "x-class=agent"}, {"x_class": "chat"}, False),
        ({"model": "m", "tenant": "a"}, {"tenant": "b"}, False),
    ],
)
def test_a_route_matches_by_model_path_tenant_and_header(
    route: dict[str, str], request_: dict[str, str], matches: bool
) -> None:
    assert (picked(RouteConfig(name="r", **route), **request_) == "r") is matches  # type: ignore[arg-type]


@given(st.text("ab*", min_size=1, max_size=8), st.text("ab\n", max_size=10))
def test_a_star_matches_any_text(pattern: str, model: str) -> None:
    expression = ".*".join(map(re.escape, pattern.split("*")))
    expected = re.fullmatch(expression, model, re.DOTALL) is not None
    assert (picked(RouteConfig(name="r", model=pattern), model=model) == "r") is expected


def test_a_route_is_matched_in_time_that_grows_with_the_value() -> None:
    route = RouteConfig(name="r", header="x-class=" + "*a" * 20 + "*b")
    with cpu_limit(2.0):
        assert picked(route, x_class="a" * 65_000) is None


def test_the_first_matching_route_is_picked() -> None:
    routes = RouteConfig(name="a", model="x"), RouteConfig(name="b", tenant="t"), RouteConfig(name="c")
    assert picked(*routes, tenant="t") == "b"
    assert picked(*routes) == "c"
    assert picked(routes[0]) is None
    assert not Routes()


def test_a_route_sets_priority_and_deadlines() -> None:
    route = Routes([RouteConfig(name="r", ttft_deadline_ms=500, total_deadline_ms=20_000, priority="low")]).pick(
        "", "", "", lambda _: b""
    )
    assert route is not None
    assert (route.name, route.priority, route.ttft_s, route.total_s) == ("r", LOW, 0.5, 20.0)


@pytest.mark.parametrize(
    ("routes", "words"),
    [
        ([{"name": "a"}, {"name": "a"}], "route 'a' is defined twice"),
        ([{"model": "a"}], "missing required field `name`"),
        ([{"name": "a", "polcy": "price"}], "unknown key routes.polcy; did you mean routes.policy?"),
        ([{"name": "a", "cache_weight": 2}], "routes[0].cache_weight"),
        ([{"name": "a", "header": "x y=1"}], "routes[0].header"),
        ([{"name": "a", "policy": "best"}], "routes[0].policy"),
    ],
)
def test_an_invalid_route_is_rejected_with_its_key(routes: list[dict[str, object]], words: str) -> None:
    with pytest.raises(ConfigError) as rejected:
        from_table({"routes": routes}, experiment=True)
    assert words in str(rejected.value)


def test_a_route_can_be_the_only_one_that_uses_kv_events() -> None:
    table: dict[str, object] = {"routing": {"policy": "round_robin"}}
    assert not from_table(table).uses_kv_events
    assert from_table({**table, "routes": [{"name": "a", "policy": "price"}]}).uses_kv_events


# What they change in router and admission.


def request_of(route: str) -> RoutingRequest:
    return RoutingRequest("m", route=route)


def test_routes_with_a_policy_get_their_own_and_the_others_share_the_default() -> None:
    harness = RoutingHarness(2)
    router = harness.router
    plain = router.policy
    routes = [
        RouteConfig(name="round_robin", policy="round_robin"),
        RouteConfig(name="cold", cache_weight=0.0),
        RouteConfig(name="urgent", priority="high", ttft_deadline_ms=100),
    ]
    router.reconfigure(Routing(policy="price", seed=3), Pricing(), routes)
    assert router.policy is not plain
    assert router.policy_of(request_of("round_robin")).name == "round_robin"
    assert not router.policy_of(request_of("round_robin")).wants_tokens
    assert router.policy_of(request_of("cold")) is not router.policy
    assert router.policy_of(request_of("urgent")) is router.policy, "it changes no setting of the price"
    assert router.policy_of(request_of("")) is router.policy_of(request_of("gone")) is router.policy


def test_a_route_decides_with_its_own_prices() -> None:
    harness = RoutingHarness(2)
    warm, cold = harness.nodes
    mine = prompt(20_000, 1)
    harness.warm(warm, mine)
    harness.busy(warm, 6000)
    harness.router.reconfigure(Routing(seed=3), Pricing(), [RouteConfig(name="cold", cache_weight=0.0)])
    assert harness.decide(mine).node is warm
    assert harness.decide(mine, route="cold").node is cold
    request = harness.submit(mine, route="cold")
    assert request.node is cold


def test_a_queued_request_follows_the_changes_of_its_route() -> None:
    harness = RoutingHarness(1)
    running = harness.busy(harness.nodes[0])
    request = harness.submit(route="batch")
    assert request.queued, "an unknown route changes nothing"
    harness.router.reconfigure(Routing(policy="price"), Pricing(), [RouteConfig(name="batch", policy="round_robin")])
    harness.tick()
    assert request.admitted and request.decision.policy == "round_robin"
    request.finish()
    harness.free(running)
    harness.assert_all_counters_are_zero()


def test_a_route_is_admitted_with_its_own_settings() -> None:
    harness = RoutingHarness(1)
    routes = [
        RouteConfig(name="eager", queue_at_router=False),
        RouteConfig(name="hurried", max_wait_s=1.0),
        RouteConfig(name="strict", queue_threshold=1),
    ]
    harness.admission.reconfigure(AdmissionConfig(), routes)
    harness.busy(harness.nodes[0])

    eager, hurried, plain = harness.submit(route="eager"), harness.submit(route="hurried"), harness.submit(route="")
    assert eager.admitted and hurried.queued and plain.queued
    harness.nodes[0].update_load(4, 1, 0.1, harness.now_s)
    assert harness.submit(route="strict").why == "queue_threshold"
    harness.advance(1.1)
    harness.tick()
    assert hurried.why == "queue_timeout" and plain.queued


def test_a_route_that_stops_queueing_admits_its_queued_requests() -> None:
    harness = RoutingHarness(1)
    harness.busy(harness.nodes[0])
    requests = [harness.submit(route=route) for route in ("a", "b")]
    harness.admission.reconfigure(AdmissionConfig(), [RouteConfig(name="a", queue_at_router=False)])
    harness.tick()
    assert requests[0].admitted and requests[1].queued


def test_every_priority_name_has_a_number() -> None:
    names = {Routes([RouteConfig(name="r", priority=name)])._routes[0].priority for name in ("high", "normal", "low")}
    assert names == {HIGH, NORMAL, LOW}
