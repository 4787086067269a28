"""Routes: which requests they fit, and what they change for those alone."""

from __future__ import annotations

import pytest
from priced import PendingRequest, World, prompt

from warmroute.config import Admission as AdmissionConfig
from warmroute.config import ConfigError, Pricing, RouteConfig, Routing, from_table
from warmroute.prompt.routing_request import HIGH, LOW, NORMAL, RoutingRequest
from warmroute.routing.refusals import QueuesFull, WaitedTooLong
from warmroute.routing.routes import Routes

CHAT = "/v1/chat/completions"


def picked(*routes: RouteConfig, model: str = "m", path: str = CHAT, tenant: str = "", **headers: str) -> str | None:
    fields = {name.replace("_", "-").encode(): value.encode() for name, value in headers.items()}
    route = Routes(routes).pick(model, path, tenant, lambda name: fields.get(name, b""))
    return route.name if route is not None else None


@pytest.mark.parametrize(
    ("route", "request_", "fits"),
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
def test_what_a_route_fits(route: dict[str, str], request_: dict[str, str], fits: bool) -> None:
    assert (picked(RouteConfig(name="r", **route), **request_) == "r") is fits  # type: ignore[arg-type]


def test_the_first_that_fits_counts() -> None:
    routes = RouteConfig(name="a", model="x"), RouteConfig(name="b", tenant="t"), RouteConfig(name="c")
    assert picked(*routes, tenant="t") == "b"
    assert picked(*routes) == "c"
    assert picked(routes[0]) is None
    assert not Routes()


def test_what_a_route_gives_to_a_request() -> None:
    route = Routes([RouteConfig(name="r", ttft_ms=500, total_ms=20_000, priority="low")]).pick(
        "", "", "", lambda _: b""
    )
    assert route is not None
    request = RoutingRequest("m")
    route.apply(request, 100.0)
    assert (request.route, request.priority, request.deadline_s, request.total_deadline_s) == ("r", LOW, 100.5, 120.0)


@pytest.mark.parametrize(
    ("routes", "words"),
    [
        ([{"name": "a"}, {"name": "a"}], "two routes are named 'a'"),
        ([{"model": "a"}], "missing required field `name`"),
        ([{"name": "a", "polcy": "price"}], "unknown key routes.polcy; did you mean routes.policy?"),
        ([{"name": "a", "locality": 2}], "routes[0].locality"),
        ([{"name": "a", "header": "x y=1"}], "routes[0].header"),
        ([{"name": "a", "policy": "best"}], "routes[0].policy"),
    ],
)
def test_a_wrong_route_is_refused_by_its_key(routes: list[dict[str, object]], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        from_table({"routes": routes})
    assert words in str(refused.value)


def test_routes_may_want_events_where_nobody_else_does() -> None:
    table: dict[str, object] = {"routing": {"policy": "round_robin"}}
    assert not from_table(table).uses_events
    assert from_table({**table, "routes": [{"name": "a", "policy": "price"}]}).uses_events


# What they change.


def ask_of(route: str) -> RoutingRequest:
    request = RoutingRequest("m")
    request.route = route
    return request


def test_each_route_has_its_policy_and_the_others_share_one() -> None:
    world = World(2)
    router = world.router
    plain = router.policy
    routes = [
        RouteConfig(name="turns", policy="round_robin"),
        RouteConfig(name="cold", max_saving_ms=0.5, locality=0.0, memory=False),
        RouteConfig(name="urgent", priority="high", ttft_ms=100),
    ]
    router.reconfigure(Routing(policy="price", seed=3), Pricing(), routes)
    assert router.policy is not plain
    assert router.policy_of(ask_of("turns")).name == "round_robin"
    assert not router.policy_of(ask_of("turns")).wants_tokens
    assert router.policy_of(ask_of("cold")) is not router.policy
    assert router.policy_of(ask_of("urgent")) is router.policy, "it changes nothing in a price"
    assert router.policy_of(ask_of("")) is router.policy_of(ask_of("gone")) is router.policy


def test_a_route_decides_by_its_own_prices() -> None:
    world = World(2)
    warm, cold = world.nodes
    mine = prompt(20_000, 1)
    world.warm(warm, mine)
    world.busy(warm, 6000)
    world.router.reconfigure(Routing(seed=3), Pricing(), [RouteConfig(name="cold", max_saving_ms=0.5)])
    assert world.decide(mine).node is warm
    assert world.decide(mine, ask_of("cold")).node is cold
    guest = PendingRequest(world, mine)
    guest.request.route = "cold"
    guest.enter()
    assert guest.node is cold


def test_who_waits_is_thought_of_by_its_route_and_by_what_that_becomes() -> None:
    world = World(1)
    running = world.busy(world.nodes[0])
    guest = PendingRequest(world, prompt(8000))
    guest.request.route = "batch"
    guest.enter()
    assert guest.waits, "a route that is not configured changes nothing"
    world.router.reconfigure(Routing(policy="price"), Pricing(), [RouteConfig(name="batch", policy="round_robin")])
    world.tick()
    assert guest.fates == ["went"] and guest.decision.policy == "round_robin"
    guest.finish()
    world.free(running)
    world.books_are_closed()


def test_each_route_is_admitted_by_its_own_settings() -> None:
    world = World(1)
    routes = [
        RouteConfig(name="eager", hold=False),
        RouteConfig(name="hurried", max_wait_s=1.0),
        RouteConfig(name="strict", queue_threshold=1),
    ]
    world.admission.reconfigure(AdmissionConfig(), routes)
    world.busy(world.nodes[0])

    def entered(route: str) -> PendingRequest:
        guest = PendingRequest(world, prompt(8000))
        guest.request.route = route
        guest.enter()
        return guest

    eager, hurried, plain = entered("eager"), entered("hurried"), entered("")
    assert eager.fates == ["went"] and hurried.waits and plain.waits
    world.nodes[0].saw_load(4, 1, 0.1, world.now_s)
    with pytest.raises(QueuesFull):
        entered("strict")
    world.later(1.1)
    world.tick()
    assert isinstance(hurried.why, WaitedTooLong) and plain.waits


def test_a_hold_that_a_reload_takes_away_lets_those_go_who_wait() -> None:
    world = World(1)
    world.busy(world.nodes[0])
    guests = []
    for route in ("a", "b"):
        guest = PendingRequest(world, prompt(8000))
        guest.request.route = route
        guest.enter()
        guests.append(guest)
    world.admission.reconfigure(AdmissionConfig(), [RouteConfig(name="a", hold=False)])
    world.tick()
    assert guests[0].fates == ["went"] and guests[1].waits


def test_priorities_have_the_same_names_everywhere() -> None:
    names = {Routes([RouteConfig(name="r", priority=name)])._routes[0].priority for name in ("high", "normal", "low")}
    assert names == {HIGH, NORMAL, LOW}
