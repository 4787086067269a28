"""Drives the scaling core in real time: asks clouds for nodes, follows their lives, and puts them into the fleet.

    every second    what clouds tell of their machines → lives; who is ready, empty or overdue → the next state
    every interval  core.step() → nodes are asked for and given back

No turn waits for a cloud: every call is a task of its own, with a time limit. Nothing is kept that a crash could lose.
Machines that carry the deployment's name and that nobody here asked for are those of a router before this one: they
are taken over, and serve or are given back like the others. A node is in the fleet from its address on, so that it is
watched; it takes requests when what is hot has been prefilled there. One that somebody takes out of the fleet by hand
is given back when its requests have finished, and so is one that has not answered for as long as a new one may take to
load. In a dry run nobody new is taken in; what had begun goes on.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final, Protocol

import msgspec

from warmroute.config import ConfigError, NodeConfig
from warmroute.fleet.fleet import Fleet, NameTaken, UnknownNode
from warmroute.fleet.health import Standing
from warmroute.fleet.node import Node
from warmroute.index.hot import HotPrefix
from warmroute.scaling.cloud import GONE, Cloud
from warmroute.scaling.core import Core
from warmroute.scaling.decision_log import Sayings
from warmroute.scaling.loop import Step
from warmroute.scaling.node_lifecycle import Event, NodeLife, State
from warmroute.scaling.offer import Offer
from warmroute.scaling.provisioner import CloudError, Machine, MachineState, NoCapacity, new_token
from warmroute.scaling.warm import Warmer

log = logging.getLogger("warmroute.scaling")

TICK_S: Final = 1.0
EVENTUAL_S: Final = 30.0
"""A machine that its cloud does not tell of for so long is no more. Before, it may not know yet, or have overlooked it;
and for so long it may still tell of one that has ended."""
RESTED: Final = "is rested"
IN_FLEET: Final = (State.LOADING, State.WARMING, State.SERVING)
RETRY_S: Final = 1.0
RETRY_LIMIT_S: Final = 60.0
"""Ending a machine is tried again for ever, ever more slowly: it is paid for."""


class Nodes(Protocol):
    """The fleet's door: who comes in is watched, who goes out is forgotten."""

    def add_node(self, config: NodeConfig) -> Node: ...
    def remove_node(self, name: str) -> Node: ...


class Driver:
    def __init__(
        self,
        core: Core,
        clouds: Sequence[Cloud],
        fleet: Fleet,
        nodes: Nodes,
        warmer: Warmer,
        now: Callable[[], float] = time.monotonic,
        leads: Callable[[], bool] = lambda: True,
        on_lead: Callable[[], None] = lambda: None,
    ) -> None:
        """`leads` tells whether this process is the one that scales; `on_lead` is told when that changes."""
        self.core = core
        self.clouds = {cloud.name: cloud for cloud in clouds}
        self._fleet = fleet
        self._nodes = nodes
        self._warmer = warmer
        self._now = now
        self._leads = leads
        self._on_lead = on_lead
        self.leading = False
        self._stepped_s = float("-inf")
        self._tasks: set[asyncio.Task[None]] = set()
        self._looking: set[str] = set()
        """Clouds that are being asked just now."""
        self._joined: dict[str, Node] = {}
        """By token: the node that a life is, in the fleet or taken out of it."""
        self._found: set[str] = set()
        """Tokens of those that were taken over: when they were asked for, nobody knows."""
        self._unpriced: set[str] = set()
        """Those of them whose offer their cloud has not told of yet."""
        self._ill_s: dict[str, float] = {}
        """By token: since when a node that serves does not answer."""
        self._missing_s: dict[str, float] = {}
        """By token: when its cloud first did not tell of it."""
        self._ended_s: dict[tuple[str, str], float] = {}
        """By cloud and token: when a machine was ended that its cloud may still tell of."""
        self._surplus: set[tuple[str, str]] = set()
        """Machines that nobody asked for and that are being ended just now."""
        self._sayings = Sayings()
        self.added = self.given_back = self.refusals = self.lost = 0
        """Nodes that came to serve, that were given back, that were refused, that went by themselves."""

    async def run(self) -> None:
        while True:
            try:
                self.turn()
            except Exception:
                log.exception("a turn of the scaling loop failed; trying again")
            await asyncio.sleep(min(TICK_S, self.core.config.interval_s))

    def turn(self) -> None:
        now_s = self._now()
        leads = self._leads()
        if leads != self.leading:
            log.info("this process %s", "scales the fleet" if leads else "leaves scaling to another one")
            self.leading = leads
            self._on_lead()
        if not leads:
            return
        for cloud in self.clouds.values():
            if cloud.name not in self._looking and now_s >= cloud.next_s:
                self._looking.add(cloud.name)
                self._start(self._look(cloud))
        self._see_to_lives(now_s)
        if now_s - self._stepped_s >= self.core.config.interval_s and all(
            cloud.has_spoken for cloud in self.clouds.values()
        ):
            self._stepped_s = now_s
            self._do(self.core.step(now_s, time.time()))

    async def close(self) -> None:
        """Machines stay: the next router takes them over."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for cloud in self.clouds.values():
            await cloud.close()

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(_said(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # What is decided.

    def _do(self, step: Step) -> None:
        self._sayings.say(step, self._now(), asks=bool(self.clouds))
        if step.dry_run:
            return
        for up in step.ups:
            self._ask_for(up.offer, up.why)
        for down in step.downs:
            life = self.core.lives.named(down.node)
            if life is not None:
                self._take(life, Event.GIVE_BACK, down.why)

    def _ask_for(self, offer: Offer, why: str) -> None:
        life = self.core.lives.ask(new_token(), offer, self._now())
        log.info("node %s is asked for: %s", life.called, why)
        self._start(self._provision(self.clouds[offer.provisioner], life))

    async def _provision(self, cloud: Cloud, life: NodeLife) -> None:
        try:
            await cloud.provision(life.offer, life.token)
        except NoCapacity as why:
            if life.state is State.REQUESTED:
                self._take(life, Event.ENDED, str(why))
        except TimeoutError:
            log.warning("%s did not say in time whether a node comes; what it tells of its machines will", cloud.name)
            self.core.market.refused(life.offer.key, "no answer in time", self._now())
        except Exception as error:  # it may have begun all the same: its end is seen to
            said = str(error) if isinstance(error, CloudError) else f"{type(error).__name__}: {error}"
            if life.state is State.REQUESTED:
                self._refused(life, said)
                self._take(life, Event.GIVE_BACK, said)
        else:
            self._take(life, Event.ACCEPTED)

    def _refused(self, life: NodeLife, why: str, what: str = "was refused") -> None:
        self.refusals += 1
        log.warning("%s/%s %s: %s", life.offer.provisioner, life.offer.name, what, why)
        self.core.market.refused(life.offer.key, why, self._now())
        self.core.scaler.came_to_nothing()

    # What clouds tell.

    async def _look(self, cloud: Cloud) -> None:
        try:
            told = await cloud.look()
        finally:
            self._looking.discard(cloud.name)
        self.core.market.offered([offer for one in self.clouds.values() for offer in one.offers])
        self._price_those_found(cloud)
        if told:
            # Those that are gone first: another may have their address by now.
            for machine in sorted(cloud.machines.values(), key=lambda one: one.state not in GONE):
                self._see(cloud, machine)
            self._see_missing(cloud)
            if not self.core.config.dry_run:
                self._end_surplus(cloud)

    def _see(self, cloud: Cloud, machine: Machine) -> None:
        life = self.core.lives.get(machine.token)
        gone = machine.state in GONE
        if life is None:
            assert cloud.asked_s is not None
            ended_s = self._ended_s.get((cloud.name, machine.token))
            if gone or self.core.config.dry_run or (ended_s is not None and cloud.asked_s - ended_s <= EVENTUAL_S):
                return
            life = self._take_over(cloud, machine)
            if ended_s is not None:
                self._take(life, Event.GIVE_BACK, "it was ended, and runs all the same")
        if life.offer.provisioner != cloud.name:
            return  # another cloud's: its own word counts
        life.endable = machine.endable
        if machine.state is MachineState.ENDED or (gone and life.state is not State.ENDING):
            self._take(life, Event.ENDED, machine.reason or "its cloud has ended it")
        elif machine.reclaimed:
            self._reclaim(life, machine.reason or "its cloud takes it back")
        elif machine.state is MachineState.RUNNING and machine.url and life.state in (State.REQUESTED, State.BOOTING):
            self._join(life, machine)
        elif life.state in IN_FLEET and machine.url and machine.url != life.url:
            self._take(life, Event.ENDED, f"another machine has come in its place, {machine.url}")
            self._see(cloud, machine)
        else:
            self._take(life, Event.ACCEPTED)

    def _reclaim(self, life: NodeLife, why: str) -> None:
        """Its cloud is in a hurry."""
        life.reclaimed = True
        if life.state is State.DRAINING:
            if not life.drained:
                self._let_nobody_in(life)
            return
        if life.coming:
            self._refused(life, why, RESTED)
        self._take(life, Event.GIVE_BACK, why)

    def _take_over(self, cloud: Cloud, machine: Machine) -> NodeLife:
        self._found.add(machine.token)
        offer = cloud.offer(machine.offer)
        if offer is None:
            self._unpriced.add(machine.token)
            offer = Offer(
                provisioner=cloud.name, name=machine.offer or "unknown", island=machine.island or cloud.name, gpu="",
                usd_per_hour=0.0,
            )  # fmt: skip
        life = self.core.lives.ask(machine.token, offer, self._now())
        log.info("%s: found %s of an earlier router: taken over as node %s", cloud.name, machine.id, life.called)
        return life

    def _price_those_found(self, cloud: Cloud) -> None:
        """Machines were taken over before their cloud had said what they cost."""
        for token in list(self._unpriced):
            life = self.core.lives.get(token)
            if life is None:
                self._unpriced.discard(token)
                continue
            offer = cloud.offer(life.offer.name) if life.offer.provisioner == cloud.name else None
            if offer is None:
                continue
            self._unpriced.discard(token)
            life.offer = offer
            node = self._node(life)
            if node is not None and not node.config.gpu and not node.config.usd_per_hour:
                machine = cloud.machines.get(token)
                island = (machine.island if machine is not None else "") or offer.island
                told = {"island": island, "gpu": offer.gpu, "usd_per_hour": offer.usd_per_hour}
                self._fleet.redescribe(node, msgspec.structs.replace(node.config, **told))

    def _join(self, life: NodeLife, machine: Machine) -> None:
        """It has an address: from now on it is watched."""
        known = next((node for node in self._fleet if node.url == machine.url.rstrip("/")), None)
        if known is None:
            offer = life.offer
            name = life.called
            if any(node.name == name for node in self._fleet):
                name = f"{offer.provisioner}-{life.token}"
            island = machine.island or offer.island
            try:
                known = self._nodes.add_node(
                    NodeConfig(
                        url=machine.url,
                        name=name,
                        island=island,
                        gpu=offer.gpu,
                        usd_per_hour=offer.usd_per_hour,
                        api_key_env=self.clouds[offer.provisioner].api_key_env,
                    )
                )
            except (ConfigError, NameTaken) as error:
                why = f"it cannot be in the fleet: {error}"
                self._refused(life, why, RESTED)
                self._take(life, Event.GIVE_BACK, why)
                return
            self._fleet.drain(known.name)
        elif self.core.lives.named(known.name) is not None:
            self._take(life, Event.ACCEPTED)
            return  # the address is still another's: it comes in when that one is gone
        self._joined[life.token] = known
        life.name, life.url = known.name, machine.url
        self._take(life, Event.HAS_ADDRESS)

    def _see_missing(self, cloud: Cloud) -> None:
        """Those that should be there and are not."""
        assert cloud.asked_s is not None
        for life in self.core.lives:
            if life.offer.provisioner != cloud.name:
                continue
            if life.token in cloud.machines or life.state is State.REQUESTED:
                self._missing_s.pop(life.token, None)
            elif cloud.asked_s - self._missing_s.setdefault(life.token, cloud.asked_s) > EVENTUAL_S:
                self._take(life, Event.ENDED, "its cloud does not know it any more")
        for (name, token), ended_s in list(self._ended_s.items()):
            if name == cloud.name and token not in cloud.machines and cloud.asked_s - ended_s > EVENTUAL_S:
                del self._ended_s[name, token]

    def _end_surplus(self, cloud: Cloud) -> None:
        for machine in cloud.surplus:
            key = cloud.name, machine.id
            if key not in self._surplus:
                self._surplus.add(key)
                log.warning("%s has %s a second time, as %s: that is ended", cloud.name, machine.token, machine.id)
                self._start(self._end_one(cloud, machine, key))

    async def _end_one(self, cloud: Cloud, machine: Machine, key: tuple[str, str]) -> None:
        try:
            await cloud.terminate(machine)
        finally:
            self._surplus.discard(key)

    # What becomes of them.

    def _see_to_lives(self, now_s: float) -> None:
        lives = self.core.lives
        for life in lives.overdue(now_s):
            log.warning("node %s has been %s for too long", life.called, life.state.value)
            self._take(life, Event.LIMIT, f"it was {life.state.value} for too long")
        for life in lives:
            node = self._node(life)
            if node is None:
                if life.state in IN_FLEET:
                    self._take(life, Event.GIVE_BACK, "somebody took it out of the fleet")
                elif life.state is State.DRAINING and life.drained and not self._left_there(life):
                    self._take(life, Event.EMPTY)
            elif life.state is State.LOADING and node.health.standing is Standing.UP and node.models:
                self._take(life, Event.CHECK_PASSED)
            elif life.state is State.SERVING:
                self._see_to_health(life, node, now_s)
            elif life.state is State.DRAINING and life.drained:
                if not node.draining:  # by somebody's hand
                    self._fleet.drain(node.name)
                if not node.load:
                    self._take(life, Event.EMPTY)

    def _see_to_health(self, life: NodeLife, node: Node, now_s: float) -> None:
        """A machine whose engine has died is paid for, too. One on trial is not well before it has passed it: an engine
        may pass every check and fail every request."""
        if node.health.standing is Standing.HALF_OPEN:
            return
        if node.health.standing is not Standing.OPEN:
            self._ill_s.pop(life.token, None)
        elif now_s - self._ill_s.setdefault(life.token, now_s) > self.core.config.load_limit_s:
            self._take(life, Event.GIVE_BACK, f"it does not answer any more: {node.health.reason}")

    def _node(self, life: NodeLife) -> Node | None:
        """None where somebody took it out of the fleet by hand, or put another in its place."""
        try:
            node = self._fleet.node(life.name)
        except UnknownNode:
            return None
        return node if node is self._joined.get(life.token) else None

    def _left_there(self, life: NodeLife) -> int:
        """Requests that still run on a node that was taken out of the fleet."""
        node = self._joined.get(life.token)
        return node.inflight if node is not None else 0

    def _take(self, life: NodeLife, event: Event, why: str = "") -> None:
        """The one place where a life goes on: what its new state asks for is begun here."""
        was, never_came_up = life.state, life.never_came_up
        if self.core.lives.get(life.token) is not life:
            return  # it is over
        if self.core.lives.take(life.token, event, self._now(), why) is None:
            return
        log.info("node %s: %s → %s (%s)", life.called, was.value, life.state.value, life.why)
        if life.never_came_up and not never_came_up:
            if was is State.REQUESTED:
                self._refused(life, life.why)
            else:
                self._refused(life, f"its node never came up: {life.why}", RESTED)
        match life.state:
            case State.WARMING:
                self._start(self._warm(life))
            case State.SERVING:
                self._serve(life)
            case State.DRAINING:
                self._start(self._drain(life))
            case State.ENDING:
                self._let_nobody_in(life)
                self._start(self._end(life))
            case State.TERMINATED:
                self._forget(life, was)

    async def _warm(self, life: NodeLife) -> None:
        node = self._node(life)
        for prefix in self.core.to_warm(self._now()):
            if node is None or life.state is not State.WARMING:
                return
            await self._warmer.put(node, prefix)
        self._take(life, Event.WARM)

    def _serve(self, life: NodeLife) -> None:
        node = self._node(life)
        if node is None:
            return  # it is given back in the next turn
        self._fleet.drain(node.name, False)
        self.added += 1
        took_s = self._now() - life.asked_s if life.token not in self._found else math.nan
        self.core.market.came_up(life.offer.key, took_s)

    async def _drain(self, life: NodeLife) -> None:
        """What only this node holds of hot prefixes is put elsewhere first, unless its cloud is in a hurry."""
        machine = self._machine(life)
        try:
            if (machine is None or not machine.reclaimed) and self._node(life) is not None:
                async with asyncio.timeout(self.core.config.warm_limit_s):
                    await self._move(self.core.to_move(life.name, self._now()))
        except TimeoutError:
            log.info("moving what only node %s holds took too long; it goes all the same", life.called)
        finally:
            self._let_nobody_in(life)

    def _let_nobody_in(self, life: NodeLife) -> None:
        node = self._node(life)
        if node is not None and life.state is not State.TERMINATED:
            self._fleet.drain(node.name)
        life.drained = True

    async def _move(self, prefixes: Sequence[HotPrefix]) -> None:
        for prefix in prefixes:
            going = set(self.core.draining)
            others = [
                node
                for node in self._fleet
                if not node.draining and node.health.standing is Standing.UP and node.name not in going
            ]
            if others:
                await self._warmer.put(min(others, key=lambda node: node.pending_work), prefix)

    async def _end(self, life: NodeLife) -> None:
        """Until it has ended, or its cloud does not know it: a machine that runs is paid for."""
        cloud = self.clouds.get(life.offer.provisioner)
        retry_s = RETRY_S
        while cloud is not None and life.state is State.ENDING:
            machine = self._machine(life)
            if machine is not None and await cloud.terminate(machine):
                self._ended_s[cloud.name, life.token] = self._now()
                break
            if machine is None and cloud.asked_s is not None and cloud.asked_s - life.since_s > EVENTUAL_S:
                break
            await asyncio.sleep(retry_s)
            retry_s = min(RETRY_LIMIT_S, 2.0 * retry_s) if machine is not None else RETRY_S
        self._take(life, Event.ENDED)

    def _machine(self, life: NodeLife) -> Machine | None:
        cloud = self.clouds.get(life.offer.provisioner)
        return cloud.machines.get(life.token) if cloud is not None else None

    def _forget(self, life: NodeLife, was: State) -> None:
        if self._node(life) is not None:
            self._nodes.remove_node(life.name)
        self._joined.pop(life.token, None)
        self._missing_s.pop(life.token, None)
        self._ill_s.pop(life.token, None)
        self._found.discard(life.token)
        if was is State.ENDING and life.serving_s is not None:
            self.given_back += 1
        elif was in (State.SERVING, State.DRAINING):
            self.lost += 1
            log.warning("node %s went by itself: %s", life.called, life.why)


async def _said(work: Coroutine[Any, Any, None]) -> None:
    try:
        await work
    except Exception:
        log.exception("a task of the scaling loop failed")
