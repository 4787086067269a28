"""Scaling in the service: the core, its driver, the clouds and KEDA, put together from the configuration."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from warmroute.config import Config, ConfigError
from warmroute.fleet.demand import DemandMeter
from warmroute.fleet.fleet import Fleet
from warmroute.index.cache_view import CacheView
from warmroute.index.hot import HotPrefixes
from warmroute.scaling.cloud import Cloud
from warmroute.scaling.core import Core
from warmroute.scaling.driver import Driver, Nodes
from warmroute.scaling.leader import FileLock
from warmroute.scaling.node_lifecycle import State
from warmroute.scaling.provisioners import provisioner_named
from warmroute.scaling.warm import Post, Warmer

log = logging.getLogger("warmroute.scaling")


class Figures(msgspec.Struct, frozen=True):
    """For the metrics page."""

    desired_nodes: int
    states: dict[str, int]
    usd_per_hour: float
    utilisation: float
    added: int
    given_back: int
    refused: int
    lost: int
    leading: bool


class LiveScaling:
    def __init__(
        self, config: Config, fleet: Fleet, cache_view: CacheView, nodes: Nodes, post: Post, waiting: Callable[[], int],
        hold: Callable[[float], None],
    ) -> None:  # fmt: skip
        """`hold` is told how long requests are to wait for a first node. Raises ConfigError where a provisioner can't
        be had."""
        self._config = config
        self._fleet = fleet
        self.demand_meter = DemandMeter()
        self.hot = HotPrefixes() if config.scaling.warm_prefixes else None
        self._waiting = waiting
        self._hold = hold
        self.core = Core(config.scaling, fleet, cache_view, self.demand_meter, self.hot, waiting)
        now = time.monotonic
        clouds = [Cloud(provisioner_named(one), one.timeout_s, now, one.api_key_env) for one in config.provisioners]
        lock = FileLock(Path(config.scaling.lock_file).expanduser()) if config.scaling.lock_file else None
        leads = lock.leads if lock is not None else lambda: True
        self.driver = Driver(self.core, clouds, fleet, nodes, Warmer(post), now, leads, self._say_hold)
        self._lock = lock
        self._say_hold()
        self._task: asyncio.Task[None] | None = None
        self._keda: Any = None

    @property
    def hold_s(self) -> float:
        """How long a request waits here for a first node: not at all where none would come. That is so in a dry run,
        and where another process leads: what its provisioners make comes to its own fleet, not to this one. Without
        provisioners somebody else adds nodes, to all alike."""
        scaling = self.core.config
        comes = self._lock is None or self.driver.leading or not self.driver.clouds
        return scaling.hold_s if comes and not scaling.dry_run else 0.0

    def _say_hold(self) -> None:
        self._hold(self.hold_s)

    async def start(self) -> None:
        """Raises ConfigError where KEDA's port can't be listened on, or the lock file not be had."""
        scaling = self._config.scaling
        if self._lock is not None:
            try:
                self._lock.leads()
            except OSError as error:
                raise ConfigError(f"scaling.lock_file: {scaling.lock_file}: {error.strerror}") from None
        if scaling.keda_port:
            try:
                from warmroute.scaling.keda import KedaScaler
            except ImportError as error:
                raise ConfigError(f"scaling.keda_port needs {error.name}: install warmroute[keda]") from None
            self._keda = KedaScaler(lambda: self.core.desired_nodes, lambda: self.core.desired_nodes > 0)
            await self._keda.start(scaling.keda_host, scaling.keda_port)
            log.info("KEDA's external scaler listens on %s:%d", scaling.keda_host, self._keda.port)
        self._task = asyncio.get_running_loop().create_task(self.driver.run())
        log.info(
            "scaling %sfrom %d to %d nodes%s",
            "is only said (dry run), " if scaling.dry_run else "",
            scaling.min_nodes,
            scaling.max_nodes,
            f", with {', '.join(self.driver.clouds)}" if self.driver.clouds else "; no provisioners: it is only told",
        )

    def reconfigure(self, config: Config) -> None:
        if config.provisioners != self._config.provisioners:
            log.warning("changes to [[provisioners]] count only after a restart")
        before, after = self._config.scaling, config.scaling
        if any(getattr(before, name) != getattr(after, name) for name in ("lock_file", "keda_host", "keda_port")):
            log.warning("changes to scaling.lock_file and scaling.keda_… count only after a restart")
        self._config = config
        self.core.reconfigure(config.scaling)
        self._say_hold()

    async def close(self) -> None:
        """Nodes stay as they are: the next router takes them over."""
        if self._task is not None:
            self._task.cancel()
        await self.driver.close()
        if self._keda is not None:
            await self._keda.close()
        if self._lock is not None:
            self._lock.release()

    # For people and pages.

    def figures(self) -> Figures:
        core, driver = self.core, self.driver
        states = Counter(life.state.value for life in core.lives)
        return Figures(
            desired_nodes=core.desired_nodes,
            states={state.value: states[state.value] for state in State if state is not State.TERMINATED},
            usd_per_hour=sum(node.config.usd_per_hour for node in self._fleet),
            utilisation=core.last.utilisation if core.last is not None else 0.0,
            added=driver.added,
            given_back=driver.given_back,
            refused=driver.refusals,
            lost=driver.lost,
            leading=driver.leading,
        )

    def describe(self) -> dict[str, Any]:
        core, now_s = self.core, time.monotonic()
        last = core.last
        resting = core.market.resting(now_s)
        return {
            "enabled": True,
            "leading": self.driver.leading,
            "dry_run": core.config.dry_run,
            "desired_nodes": core.desired_nodes,
            "waiting": self._waiting(),
            "last": None
            if last is None
            else {
                "seconds_ago": round(now_s - last.at_s, 1),
                "nodes": last.nodes,
                "utilisation": round(last.utilisation, 3),
                "panicking": last.panicking,
                "reasons": last.reasons,
                "doubts": last.doubts,
            },
            "nodes": [
                {
                    "node": life.name,
                    "token": life.token,
                    "state": life.state.value,
                    "for_s": round(now_s - life.since_s, 1),
                    "offer": f"{life.offer.provisioner}/{life.offer.name}",
                    "why": life.why,
                }
                for life in core.lives
            ],
            "offers": [
                {
                    "offer": f"{offer.provisioner}/{offer.name}",
                    "island": offer.island,
                    "gpu": offer.gpu,
                    "spot": offer.spot,
                    "usd_per_hour": offer.usd_per_hour,
                    "start_s": round(core.market.start_s(offer), 1),
                    "rests_for_s": round(resting[offer.key][0] - now_s, 1) if offer.key in resting else 0.0,
                    "why": resting[offer.key][1] if offer.key in resting else "",
                }
                for offer in core.market.offers
            ],
            "problems": {name: cloud.problem for name, cloud in self.driver.clouds.items() if cloud.problem},
        }
