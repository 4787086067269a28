"""This process as one of several replicas that share their state through Redis (`[cluster]`). Workers share through
their parent, which has the link to Redis (workers/supervisor.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from warmroute.cluster.redis.lease import Lease
from warmroute.cluster.redis.link import RedisLink, new_origin
from warmroute.config import Cluster
from warmroute.service.cluster_member import ClusterMember

if TYPE_CHECKING:
    from warmroute.service.service import Service


def create_lease(config: Cluster) -> Lease | None:
    """Return the lease of the autoscaler; None without other replicas."""
    return Lease(config, new_origin()) if config.url else None


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
