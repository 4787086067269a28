"""This process as one of several replicas that share their state through Redis (`[cluster]`)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from warmroute.app.process_seat import Seat
from warmroute.app.redis import Lease
from warmroute.app.replicas.cluster_member import ClusterMember
from warmroute.app.replicas.redis_link import RedisLink, new_origin
from warmroute.config import Config
from warmroute.scaling.lease import FileLease
from warmroute.scaling.scaling_service import RouterLease

if TYPE_CHECKING:
    from warmroute.app.service import Service


def create_lease(config: Config, seat: Seat | None) -> RouterLease | None:
    """Return the lease of the autoscaler; None if this process needs none. Without provisioners, each router decides
    how many nodes it wants, since KEDA may ask any of them. The next brain of the same parent goes on with what the
    autoscaler of the one before has written down."""
    if config.cluster.url and config.provisioners:
        return Lease(config.cluster, new_origin())
    if seat is None:
        return None
    lock_file = config.scaling.lock_file if config.provisioners else ""
    if lock_file:  # other routers may use it, too
        return FileLease(Path(lock_file).expanduser(), seat.folder)
    return FileLease(Path(seat.folder) / "scaling.lock")


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
