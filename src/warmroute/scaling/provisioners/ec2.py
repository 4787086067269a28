"""ec2: instances of AWS, in several regions.

Every instance carries three tags: the deployment, the token and the offer that it was asked for with. The token is
also the request's client token, so that asking twice starts one. A region that does not answer keeps the machines that
it had, so that nobody takes them for gone; and its calls keep no other region's waiting. An instance that was stopped
serves nobody, and its disks are paid for: it is to be ended.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar

import boto3
import msgspec
from botocore.config import Config as BotoConfig
from botocore.exceptions import BotoCoreError, ClientError, ReadTimeoutError

from warmroute.blocking import aside
from warmroute.config import ConfigError, ProvisionerConfig
from warmroute.scaling.offer import Offer
from warmroute.scaling.provisioner import CloudError, Machine, MachineState, NoAnswer, NoCapacity
from warmroute.scaling.provisioners.configured import sanity_of

T = TypeVar("T")

DEPLOYMENT, TOKEN, OFFER, RECLAIMED = (
    "warmroute:deployment",
    "warmroute:token",
    "warmroute:offer",
    "warmroute:reclaimed",
)
STATES = {
    "pending": MachineState.PENDING,
    "running": MachineState.RUNNING,
    "stopping": MachineState.PENDING,
    "stopped": MachineState.PENDING,
    "shutting-down": MachineState.ENDING,
    "terminated": MachineState.ENDED,
}
STOPPED = ("stopping", "stopped")
AT_ONCE = 8
"""Calls to a region at once, those counted that were given up and have not come back yet."""
NO_CAPACITY = (
    "InsufficientInstanceCapacity",
    "InsufficientHostCapacity",
    "InsufficientReservedInstanceCapacity",
    "InsufficientFreeAddressesInSubnet",
    "InstanceLimitExceeded",
    "MaxSpotInstanceCountExceeded",
    "SpotMaxPriceTooLow",
    "VcpuLimitExceeded",
    "Unsupported",  # this type is not to be had in this zone
    "UnfulfillableCapacity",
)
GONE = ("InvalidInstanceID.NotFound", "InvalidInstanceID.Malformed")
RECLAIMING = (
    "marked-for-termination",
    "marked-for-stop",
    "instance-terminated-by-price",
    "instance-terminated-no-capacity",
)
"""Status codes of a spot request whose instance is being taken back."""
FILTER_VALUES = 200
"""The most that AWS takes in one filter."""


class Ec2Provisioner:
    def __init__(self, config: ProvisionerConfig, session: Any = None) -> None:
        self.name = config.label
        self._config = config
        self._session = session or boto3.session.Session()
        self._making = Lock()
        self._sanity = sanity_of(config)
        self._places = {region: asyncio.Semaphore(AT_ONCE) for region in config.regions}
        self._clients: dict[str, Any] = {}
        self._gpus: dict[str, dict[str, tuple[str, int]]] = {}
        self._last_seen: dict[str, list[Machine]] = {}
        try:
            self._user_data = Path(config.user_data_file).read_text() if config.user_data_file else ""
        except OSError as error:
            raise ConfigError(f"provisioners.user_data_file: {config.user_data_file}: {error.strerror}") from None

    async def offers(self) -> list[Offer]:
        results = await asyncio.gather(
            *(self._call(region, "offers", self._offers) for region in self._config.regions), return_exceptions=True
        )
        offers: list[Offer] = []
        said: list[str] = []
        for region, result in zip(self._config.regions, results, strict=True):
            if isinstance(result, CloudError):
                said.append(f"{self.name}: {region} makes no offers: {result}")
            elif isinstance(result, BaseException):
                raise result
            else:
                offers += result[0]
                said += result[1]
        if all(isinstance(result, CloudError) for result in results):
            raise CloudError(said[0])
        return self._sanity.check(offers, said)

    async def provision(self, offer: Offer, token: str) -> None:
        region = offer.name.partition("/")[0]
        if region not in self._config.regions:
            raise CloudError(f"{self.name}: the offer {offer.name!r} is in no region of this configuration")
        await self._call(region, "run instances", lambda region: self._provision(region, offer, token))

    async def status(self) -> list[Machine]:
        results = await asyncio.gather(
            *(self._call(region, "describe instances", self._status) for region in self._config.regions),
            return_exceptions=True,
        )
        machines: list[Machine] = []
        for region, result in zip(self._config.regions, results, strict=True):
            if isinstance(result, CloudError):
                if region not in self._last_seen:
                    raise result
                reason = f"not heard of since: {result}"
                machines += [msgspec.structs.replace(one, reason=reason) for one in self._last_seen[region]]
            elif isinstance(result, BaseException):
                raise result
            else:
                self._last_seen[region] = result
                machines += result
        return machines

    async def terminate(self, machine: Machine) -> None:
        region, _, instance = machine.id.partition("/")
        if region not in self._places:
            raise CloudError(f"{self.name}: {machine.id!r} is in no region of this configuration")
        await self._call(region, "terminate instances", lambda region: self._terminate(region, instance))

    async def close(self) -> None:
        pass

    async def _call(self, region: str, what: str, call: Callable[[str], T]) -> T:
        try:
            async with asyncio.timeout(self._config.timeout_s):
                return await aside(lambda: call(region), self.name, self._places[region])
        except (TimeoutError, ReadTimeoutError):
            raise NoAnswer(f"{self.name}: {region}: {what} took longer than {self._config.timeout_s:g} s") from None
        except ClientError as error:
            code, message = error.response["Error"].get("Code", ""), error.response["Error"].get("Message", "")
            kind = NoCapacity if code in NO_CAPACITY else CloudError
            raise kind(f"{self.name}: {region}: {what}: {code}: {message}") from None
        except BotoCoreError as error:
            raise CloudError(f"{self.name}: {region}: {what}: {error}") from None

    # The rest runs in threads.

    def _client(self, region: str) -> Any:
        """Clients may be shared by threads; a session, which makes them, may not."""
        with self._making:
            client = self._clients.get(region)
            if client is None:
                limits = BotoConfig(
                    connect_timeout=min(5.0, self._config.timeout_s),
                    read_timeout=self._config.timeout_s,
                    retries={"mode": "standard", "max_attempts": 2},
                )
                client = self._clients[region] = self._session.client(
                    "ec2", region_name=region, endpoint_url=self._config.endpoint_url or None, config=limits
                )
            return client

    def _offers(self, region: str) -> tuple[list[Offer], list[str]]:
        config = self._config
        offers, said = [], []
        gpus = self._gpus_in(region)
        spot_prices = self._spot_prices(region) if "spot" in config.markets else {}
        for kind in config.instance_types:
            if kind not in gpus:
                continue  # not to be had in this region
            gpu, count = gpus[kind]
            for market in config.markets:
                name = f"{region}/{kind}" + ("/spot" if market == "spot" else "")
                usd = self._price(region, kind, market == "spot", spot_prices)
                if usd is None:
                    said.append(f"{self.name}: the offer {name!r} has no price: set provisioners.prices: dropped")
                    continue
                offers.append(
                    Offer(
                        provisioner=self.name,
                        name=name,
                        island=config.island or f"aws/{region}",
                        gpu=config.gpu or gpu,
                        gpus=count,
                        spot=market == "spot",
                        usd_per_hour=usd,
                        start_s=config.start_s,
                        most=config.most or None,
                    )
                )
        return offers, said

    def _price(self, region: str, kind: str, spot: bool, spot_prices: dict[str, float]) -> float | None:
        prices = self._config.prices
        if spot:
            return prices.get(f"{region}/{kind}/spot", prices.get(f"{kind}/spot", spot_prices.get(kind)))
        return prices.get(f"{region}/{kind}", prices.get(kind))

    def _gpus_in(self, region: str) -> dict[str, tuple[str, int]]:
        """GPU and how many of them, for each of the types that this region has. Asked once."""
        if region in self._gpus:
            return self._gpus[region]
        client = self._client(region)
        wanted = [{"Name": "instance-type", "Values": list(self._config.instance_types)}]
        here = {
            one["InstanceType"]
            for page in client.get_paginator("describe_instance_type_offerings").paginate(Filters=wanted)
            for one in page["InstanceTypeOfferings"]
        }
        found: dict[str, tuple[str, int]] = {}
        if here:
            for page in client.get_paginator("describe_instance_types").paginate(InstanceTypes=sorted(here)):
                for one in page["InstanceTypes"]:
                    gpus = one.get("GpuInfo", {}).get("Gpus", [])
                    found[one["InstanceType"]] = (
                        (gpus[0]["Name"], sum(gpu["Count"] for gpu in gpus)) if gpus else ("cpu", self._config.gpus)
                    )
        self._gpus[region] = found
        return found

    def _spot_prices(self, region: str) -> dict[str, float]:
        """The lowest of the zones' latest prices, by type."""
        latest: dict[tuple[str, str], tuple[datetime, float]] = {}
        pages = self._client(region).get_paginator("describe_spot_price_history")
        for page in pages.paginate(
            InstanceTypes=list(self._config.instance_types),
            ProductDescriptions=["Linux/UNIX"],
            StartTime=datetime.now(UTC) - timedelta(hours=1),
        ):
            for one in page["SpotPriceHistory"]:
                try:
                    usd = float(one["SpotPrice"])
                except ValueError:
                    continue
                where = one["InstanceType"], one.get("AvailabilityZone", "")
                if where not in latest or one["Timestamp"] > latest[where][0]:
                    latest[where] = one["Timestamp"], usd
        prices: dict[str, float] = {}
        for (kind, _zone), (_when, usd) in latest.items():
            prices[kind] = min(usd, prices.get(kind, usd))
        return prices

    def _provision(self, region: str, offer: Offer, token: str) -> None:
        client = self._client(region)
        # A client token counts for a day, and only in one region; the tag counts for as long as the instance is there.
        if any(True for _ in self._instances(region, token)):
            return
        _region, kind, *market = offer.name.split("/")
        tags = [
            {"Key": "Name", "Value": f"{self._config.deployment}-{token}"},
            {"Key": DEPLOYMENT, "Value": self._config.deployment},
            {"Key": TOKEN, "Value": token},
            {"Key": OFFER, "Value": offer.name},
        ]
        request: dict[str, Any] = {
            "MinCount": 1,
            "MaxCount": 1,
            "InstanceType": kind,
            "ClientToken": hashlib.sha256(f"{self._config.deployment}/{token}".encode()).hexdigest(),
            "TagSpecifications": [{"ResourceType": "instance", "Tags": tags}],
            "InstanceInitiatedShutdownBehavior": "terminate",
        }
        if self._config.launch_template:
            request["LaunchTemplate"] = {"LaunchTemplateName": self._config.launch_template}
        if region in self._config.images:
            request["ImageId"] = self._config.images[region]
        if region in self._config.subnets:
            request["SubnetId"] = self._config.subnets[region]
        if self._user_data:
            request["UserData"] = self._user_data
        if market == ["spot"]:
            request["InstanceMarketOptions"] = {
                "MarketType": "spot",
                "SpotOptions": {"SpotInstanceType": "one-time", "InstanceInterruptionBehavior": "terminate"},
            }
        client.run_instances(**request)

    def _instances(self, region: str, token: str = "") -> Iterator[dict[str, Any]]:
        """Ours, or the one with this token; those that have ended are there for an hour or so."""
        ours = [{"Name": f"tag:{DEPLOYMENT}", "Values": [self._config.deployment]}]
        if token:
            ours.append({"Name": f"tag:{TOKEN}", "Values": [token]})
        for page in self._client(region).get_paginator("describe_instances").paginate(Filters=ours):
            for reservation in page["Reservations"]:
                yield from reservation["Instances"]

    def _status(self, region: str) -> list[Machine]:
        instances = list(self._instances(region))
        taken_back = self._taken_back(region, instances)
        return [self._machine(region, one, taken_back.get(one["InstanceId"], "")) for one in instances]

    def _taken_back(self, region: str, instances: list[dict[str, Any]]) -> dict[str, str]:
        """Why, for each spot instance that AWS has said it takes back."""
        requests = [
            one["SpotInstanceRequestId"]
            for one in instances
            if one.get("SpotInstanceRequestId") and one["State"]["Name"] != "terminated"
        ]
        found: dict[str, str] = {}
        for at in range(0, len(requests), FILTER_VALUES):
            some = [{"Name": "spot-instance-request-id", "Values": requests[at : at + FILTER_VALUES]}]
            for page in self._client(region).get_paginator("describe_spot_instance_requests").paginate(Filters=some):
                for one in page["SpotInstanceRequests"]:
                    status = one.get("Status") or {}
                    if status.get("Code") in RECLAIMING:
                        found[one.get("InstanceId", "")] = status.get("Message") or status["Code"]
        return found

    def _machine(self, region: str, instance: dict[str, Any], taken_back: str) -> Machine:
        tags = {tag["Key"]: tag["Value"] for tag in instance.get("Tags", ())}
        said = instance["State"]["Name"]
        state = STATES.get(said, MachineState.PENDING)
        stopped = f"it is {said}" if said in STOPPED else ""
        address = instance.get("PublicIpAddress" if self._config.address == "public" else "PrivateIpAddress") or ""
        if state is MachineState.RUNNING and not address:
            state = MachineState.PENDING
        return Machine(
            id=f"{region}/{instance['InstanceId']}",
            token=tags.get(TOKEN, ""),
            offer=tags.get(OFFER, ""),
            state=state,
            url=f"http://{address}:{self._config.port}" if address else "",
            reclaimed=bool(taken_back or stopped) or RECLAIMED in tags,
            started_s=instance["LaunchTime"].timestamp(),
            reason=taken_back or tags.get(RECLAIMED, "") or instance.get("StateTransitionReason", "") or stopped,
            island=self._config.island or f"aws/{region}",
        )

    def _terminate(self, region: str, instance: str) -> None:
        try:
            self._client(region).terminate_instances(InstanceIds=[instance])
        except ClientError as error:
            if error.response["Error"].get("Code") not in GONE:
                raise
