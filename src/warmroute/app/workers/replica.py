"""This process as one of several replicas that share their state through Redis (`[cluster]`). Workers share through
their parent, which has the link to Redis (workers/supervisor.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from warmroute.app.redis import Lease
from warmroute.app.workers.cluster_member import ClusterMember
from warmroute.app.workers.redis_link import RedisLink, new_origin
from warmroute.app.workers.worker import Worker
from warmroute.config import Config
from warmroute.scaling.lease import FileLease
from warmroute.scaling.scaling_service import RouterLease

if TYPE_CHECKING:
    from warmroute.app.service import Service


def create_lease(config: Config, worker: Worker | None) -> RouterLease | None:
    """Return the lease of the autoscaler; None if this process needs none. Without provisioners, each router decides
    how many nodes it wants, since KEDA may ask any of them; of its workers, one does."""
    if config.cluster.url and config.provisioners:
        return Lease(config.cluster, new_origin())
    if worker is None:
        return None
    lock_file = config.scaling.lock_file if config.provisioners else ""
    if lock_file:  # other routers may use it, too
        return FileLease(Path(lock_file).expanduser(), worker.seat.origin)
    return FileLease(worker.seat.folder / "scaling.lock")


class Replica:
    """The receiver of the link's messages."""

    def __init__(self, service: Service) -> None:
        self._link = RedisLink(service.config.cluster, new_origin(), self)
        self.member = ClusterMember(self._link.origin, service, self._link)
        self.member.read_status = self._link.status
        self.link_changed()
        self._link.start()

    def receive(self, message: bytes) -> None:
        self.member.receive(message)

    def receive_stored(self, values: list[bytes]) -> None:
        self.member.receive_stored(values)

    def link_changed(self) -> None:
        self.member.link_changed()

    async def close(self) -> None:
        self.member.leave()
        await self._link.close()
        self.member.close()
