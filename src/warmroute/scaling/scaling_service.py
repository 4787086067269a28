"""Scaling in the service: creates the autoscaler, its control loop, the provisioners and KEDA's scaler from the
configuration, and describes their state for the admin API and the metrics.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import msgspec

from warmroute.config import Config, ConfigError, missing_extra
from warmroute.config.scaling import Pool
from warmroute.core.cache_view import CacheView
from warmroute.core.demand import DemandMeter
from warmroute.core.fleet import Fleet
from warmroute.core.hot_prefixes import HotPrefixes
from warmroute.event_log import EventLog
from warmroute.scaling.autoscaler import POOLS, Autoscaler
from warmroute.scaling.control_loop import ControllerLoop, LeaderLease, Post, PrefixPrefiller, ScalingNodes
from warmroute.scaling.fleet_plan import router_settings
from warmroute.scaling.lease import LeaderLock
from warmroute.scaling.node_lifecycle import LifecycleState
from warmroute.scaling.provisioner import ProvisionerClient
from warmroute.scaling.provisioners import create_provisioner
from warmroute.scaling.recent_traffic import RecentTraffic
from warmroute.scaling.replay_planner import PlannerStats, PlanningProcess
from warmroute.scaling.scaling_decision import PoolDecision

log = EventLog("warmroute.scaling")


class ScalingStats(msgspec.Struct, frozen=True):
    """What the metrics page shows of scaling."""

    desired_nodes: int
    states: dict[str, int]
    usd_per_hour: float
    utilisation: float
    added: int
    removed: int
    refused: int
    lost: int
    leading: bool
    pools: dict[Pool, PoolDecision]
    """The decision of each pool; empty where no node has a role."""
    replay: PlannerStats | None = None
    """What the searches by replay did; None if the autoscaler goes by thresholds only."""


class RouterLease(LeaderLease, Protocol):
    """A lease that runs beside the autoscaler."""

    @property
    def one_machine(self) -> bool:
        """Whether all processes that may lead are workers of one router. Then the leader alone listens for KEDA."""

    @property
    def leader_is_here(self) -> bool:
        """Whether this process gets the nodes that the leader adds."""

    def is_leader(self) -> bool: ...
    def start(self) -> None:
        """Begin to hold the lease or to wait for it. Raises ConfigError if the lease cannot be used."""

    async def close(self) -> None:
        """Let another router lead at once."""


class ScalingService:
    def __init__(
        self, config: Config, fleet: Fleet, cache_view: CacheView, nodes: ScalingNodes, post: Post,
        waiting: Callable[[], int], set_first_node_wait: Callable[[float], None],
        lease: RouterLease | None = None,
    ) -> None:  # fmt: skip
        """`waiting` returns the number of requests that wait at the router. `lease`: set if routers on several machines
        scale the fleet in turn. Raises ConfigError if a provisioner cannot be created."""
        self._config = config
        self._fleet = fleet
        self.demand_meter = DemandMeter()
        self.hot = HotPrefixes() if config.scaling.prewarm_prefixes else None
        self._waiting = waiting
        self._set_first_node_wait = set_first_node_wait
        replay = config.scaling.replay
        self.traffic = RecentTraffic(replay.window_s) if replay.enabled else None
        """The recent traffic, which the capture writes; None if the autoscaler goes by thresholds only."""
        self._planning = PlanningProcess(self.traffic, replay.cpu_share) if self.traffic is not None else None
        self.autoscaler = Autoscaler(
            config.scaling, fleet, cache_view, self.demand_meter, self.hot, lambda: self._waiting(),
            (self._planning, router_settings(config)) if self._planning is not None else None,
        )  # fmt: skip
        now = time.monotonic
        clients = [ProvisionerClient(create_provisioner(one), one.timeout_s, now, one) for one in config.provisioners]
        # without provisioners every router decides, since KEDA may ask any of them
        lock_file = config.scaling.lock_file if config.provisioners and lease is None else ""
        self._lock = LeaderLock(Path(lock_file).expanduser()) if lock_file else None
        self._lease = lease
        self._leader_was_here: bool | None = None
        is_leader = self._lock.is_leader if self._lock is not None else lambda: True
        if lease is not None:
            is_leader = self._check_lease
        self.loop = ControllerLoop(
            self.autoscaler, clients, fleet, nodes, PrefixPrefiller(post), now, is_leader,
            self._leader_changed, lease,
        )  # fmt: skip
        self._update_first_node_wait()
        self._task: asyncio.Task[None] | None = None
        self._keda: Any = None
        self._keda_task: asyncio.Task[None] | None = None

    def set_waiting(self, waiting: Callable[[], int]) -> None:
        """Set the number of requests that wait at all routers."""
        self._waiting = waiting

    @property
    def first_node_wait_s(self) -> float:
        """How long a request waits at this process for the first node; 0 if none would come. None comes in a dry run,
        or if another process leads and its provisioners add nodes to its own fleet. Without provisioners somebody else
        adds nodes, to every process."""
        scaling = self.autoscaler.config
        leader_is_here = self._lease.leader_is_here if self._lease is not None else self._lock is None
        nodes_come = leader_is_here or self.loop.leading or not self.loop.clients
        return scaling.first_node_wait_s if nodes_come and not scaling.dry_run else 0.0

    def _check_lease(self) -> bool:
        """Return whether this process leads. If another router begins to lead, or a worker of this one, requests wait
        for a first node accordingly."""
        lease = self._lease
        assert lease is not None
        leads, leader_is_here = lease.is_leader(), lease.leader_is_here
        if leader_is_here != self._leader_was_here:
            self._leader_was_here = leader_is_here
            self._update_first_node_wait()
        return leads

    def _update_first_node_wait(self) -> None:
        self._set_first_node_wait(self.first_node_wait_s)

    async def start(self) -> None:
        """Raises ConfigError if the lock file cannot be opened, or if KEDA's port is taken."""
        scaling = self._config.scaling
        if self._lock is not None:
            try:
                self._lock.is_leader()
            except OSError as error:
                raise ConfigError(f"scaling.lock_file: {scaling.lock_file}: {error.strerror}") from None
        if scaling.keda_port and not self._leader_listens:
            await self._listen_for_keda()
        if self._lease is not None:
            self._lease.start()
        self._task = asyncio.get_running_loop().create_task(self.loop.run())
        log.info(
            "scaling_started",
            min_nodes=scaling.min_nodes,
            max_nodes=scaling.max_nodes,
            provisioners=",".join(self.loop.clients) or "none",
            dry_run=scaling.dry_run,
        )

    @property
    def _leader_listens(self) -> bool:
        """Whether only the leader listens for KEDA."""
        return self._lease is not None and self._lease.one_machine

    async def _listen_for_keda(self) -> None:
        """Raises ConfigError."""
        scaling = self._config.scaling
        try:
            from warmroute.scaling.keda import KedaScaler
        except ImportError as error:
            raise missing_extra("scaling.keda_port", error, "keda") from None
        self._keda = KedaScaler(self.autoscaler.desired_in_pool)
        host = scaling.keda_host or self._config.listen.host
        await self._keda.start(host, scaling.keda_port)
        log.warning(
            "keda_deprecated",
            "The next release has no scaling.keda_port: let KEDA read GET /admin/scaling (trigger metrics-api).",
        )
        log.info("keda_listening", address=f"{host}:{self._keda.port}")

    def _leader_changed(self) -> None:
        self._update_first_node_wait()
        if self._config.scaling.keda_port and self._leader_listens:
            self._keda_task = asyncio.get_running_loop().create_task(self._follow_leader(self.loop.leading))

    async def _follow_leader(self, leading: bool) -> None:
        """Listen for KEDA if this process leads, and stop if it does not."""
        if self._keda is not None:
            keda, self._keda = self._keda, None
            await keda.close()
        if leading:
            try:
                await self._listen_for_keda()
            except ConfigError as error:
                log.error("keda_not_listening", "KEDA gets no answer from this router.", reason=error)

    def reconfigure(self, config: Config) -> None:
        """Provisioners, the lock file and KEDA's address stay as they are until a restart."""
        self.autoscaler.reconfigure(config.scaling)
        self.autoscaler.router_settings = router_settings(config)
        if self.traffic is not None and self._planning is not None:
            self.traffic.window_s = config.scaling.replay.window_s
            self._planning.cpu_share = config.scaling.replay.cpu_share
        self._update_first_node_wait()

    async def close(self) -> None:
        """Leave all nodes as they are: the next router adopts them."""
        if self._task is not None:
            self._task.cancel()
        await self.loop.close()
        if self._planning is not None:
            await self._planning.close()
        if self._keda is not None:
            await self._keda.close()
        if self._lock is not None:
            self._lock.release()
        if self._lease is not None:
            await self._lease.close()

    def stats(self) -> ScalingStats:
        autoscaler, controller = self.autoscaler, self.loop.controller
        last = autoscaler.last_decision
        states = Counter(managed.state for managed in autoscaler.managed)
        return ScalingStats(
            # Prometheus takes the maximum over routers: a stale number of a router that stopped leading must not be it.
            desired_nodes=autoscaler.desired_nodes if self.loop.leading else 0,
            states={state.value: states[state] for state in LifecycleState if state is not LifecycleState.TERMINATED},
            usd_per_hour=sum(node.config.usd_per_hour for node in self._fleet),
            utilisation=last.utilisation if last is not None else 0.0,
            added=controller.added,
            removed=controller.removed,
            refused=controller.refused,
            lost=controller.lost,
            leading=self.loop.leading,
            pools=last.pools if last is not None and self.loop.leading else {},
            replay=autoscaler.planner.stats if autoscaler.planner is not None else None,
        )

    def describe(self) -> dict[str, Any]:
        """Return the state for the admin API."""
        autoscaler, now_s = self.autoscaler, time.monotonic()
        last = autoscaler.last_decision
        backing_off = autoscaler.offers.backing_off(now_s)
        return {
            "enabled": True,
            "leading": self.loop.leading,
            "dry_run": autoscaler.config.dry_run,
            "desired_nodes": autoscaler.desired_nodes,
            # KEDA reads these two, each for a ScaledObject of its own.
            "workloads": {role: {"desired_nodes": autoscaler.desired_in_pool(role)} for role in POOLS},
            "waiting_requests": self._waiting(),
            "last_decision": None
            if last is None
            else {
                "age_s": round(now_s - last.at_s, 1),
                "nodes": last.nodes,
                "utilisation": round(last.utilisation, 3),
                "panicking": last.panicking,
                "pools": msgspec.to_builtins(last.pools),
                "reasons": last.reasons,
                "invalid_inputs": last.invalid_inputs,
            },
            "replay": self._describe_replay(now_s),
            "nodes": [
                {
                    "node": managed.name,
                    "token": managed.token,
                    "state": managed.state.value,
                    "state_age_s": round(now_s - managed.state_since_s, 1),
                    "offer": f"{managed.offer.provisioner}/{managed.offer.name}",
                    "reason": managed.reason,
                }
                for managed in autoscaler.managed
            ],
            "offers": [
                {
                    "offer": f"{offer.provisioner}/{offer.name}",
                    "island": offer.island,
                    "gpu": offer.gpu,
                    "role": offer.role,
                    "spot": offer.spot,
                    "usd_per_hour": offer.usd_per_hour,
                    "start_s": round(autoscaler.offers.start_s(offer), 1),
                    "backoff_s": round(backing_off[offer.key][0] - now_s, 1) if offer.key in backing_off else 0.0,
                    "reason": backing_off[offer.key][1] if offer.key in backing_off else "",
                }
                for offer in autoscaler.offers.offers
            ],
            "errors": {name: client.error for name, client in self.loop.clients.items() if client.error},
        }

    def _describe_replay(self, now_s: float) -> dict[str, Any] | None:
        """Return what the last replays said; None if the autoscaler goes by thresholds only."""
        planner = self.autoscaler.planner
        if planner is None or not self.autoscaler.config.replay.enabled:
            return None
        plan, stats = planner.last_plan, planner.stats
        pools = self.autoscaler.last_decision is not None and self.autoscaler.last_decision.pools
        return {
            "decides": planner.plan(now_s) is not None and not pools,
            "problem": "prefill and decode nodes are scaled by thresholds" if pools else planner.problem,
            "objective": msgspec.to_builtins(self.autoscaler.config.objective),
            "recorded_requests": len(self.traffic) if self.traffic is not None else 0,
            "predicted_ttft_p90_ms": round(stats.predicted_ms, 1),
            "observed_ttft_p90_ms": round(stats.observed_ms, 1),
            "plan": None
            if plan is None
            else {
                "age_s": round(now_s - planner.planned_s, 1),
                "explanation": plan.explain(self.autoscaler.config.objective),
                "nodes": plan.nodes,
                "desired_nodes": plan.desired_nodes,
                "growth": round(plan.growth, 3),
                "floor_ttft_p90_ms": round(plan.floor_ms, 1) if plan.floor_ms is not None else None,
                "above_baseline_ms": round(plan.above_baseline_ms, 1),
                "cpu_s": round(plan.cpu_s, 2),
                "fleets": msgspec.to_builtins([*plan.fleets, *([plan.larger] if plan.larger is not None else [])]),
            },
        }
