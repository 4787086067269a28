"""ec2: instances of AWS, in several regions.

Every instance has three tags: the deployment, the token and the offer. The token is also the client token of the
request, so that a repeated request creates one instance. While a region does not answer, the status reports its last
known machines, so that the router does not take them for gone; calls to other regions do not wait for it. A stopped
instance serves no requests and its disks are paid for, so the status reports it as reclaimed, and the router terminates
it.
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

from warmroute.blocking import run_in_thread
from warmroute.config import ConfigError, ProvisionerConfig
from warmroute.scaling.offers import Offer, OfferValidator, configured_offer
from warmroute.scaling.provisioner import Machine, MachineState, NoCapacity, ProvisionerError, ProvisionerTimeout

T = TypeVar("T")

DEPLOYMENT = "warmroute:deployment"
TOKEN = "warmroute:token"
OFFER = "warmroute:offer"
RECLAIMED = "warmroute:reclaimed"
STATES = {
    "running": MachineState.RUNNING,
    "shutting-down": MachineState.TERMINATING,
    "terminated": MachineState.TERMINATED,
}
"""What EC2's states mean. All other states are PENDING."""
STOPPED = ("stopping", "stopped")
MAX_CALLS_PER_REGION = 8
"""Concurrent calls to one region, including those that timed out and have not returned yet: each holds a thread."""
NO_CAPACITY = (
    "InsufficientInstanceCapacity",
    "InsufficientHostCapacity",
    "InsufficientReservedInstanceCapacity",
    "InsufficientFreeAddressesInSubnet",
    "InstanceLimitExceeded",
    "MaxSpotInstanceCountExceeded",
    "SpotMaxPriceTooLow",
    "VcpuLimitExceeded",
    "Unsupported",  # the zone does not have this instance type
    "UnfulfillableCapacity",
)
NOT_FOUND = ("InvalidInstanceID.NotFound", "InvalidInstanceID.Malformed")
RECLAIM_CODES = (
    "marked-for-termination",
    "marked-for-stop",
    "instance-terminated-by-price",
    "instance-terminated-no-capacity",
)
"""Status codes of a spot request whose instance AWS takes back."""
MAX_FILTER_VALUES = 200
"""AWS's limit for one filter."""


class Ec2Provisioner:
    def __init__(self, config: ProvisionerConfig, session: Any = None) -> None:
        self.name = config.label
        self._config = config
        self._session = session or boto3.session.Session()
        self._session_lock = Lock()
        self._validator = OfferValidator(config)
        self._slots = {region: asyncio.Semaphore(MAX_CALLS_PER_REGION) for region in config.regions}
        self._clients: dict[str, Any] = {}
        self._gpus: dict[str, dict[str, tuple[str, int]]] = {}
        self._last_status: dict[str, list[Machine]] = {}
        try:
            self._user_data = Path(config.user_data_file).read_text() if config.user_data_file else ""
        except OSError as error:
            raise ConfigError(f"provisioners.user_data_file: {config.user_data_file}: {error.strerror}") from None

    async def offers(self) -> list[Offer]:
        results = await self._in_all_regions("offers", self._offers)
        offers: list[Offer] = []
        problems: list[str] = []
        for region, result in results.items():
            if isinstance(result, ProvisionerError):
                problems.append(f"region {region} has no offers: {result}")
            else:
                offers += result[0]
                problems += result[1]
        if all(isinstance(result, ProvisionerError) for result in results.values()):
            raise ProvisionerError(f"{self.name}: {problems[0]}")
        return self._validator.validate(offers, problems)

    async def provision(self, offer: Offer, token: str) -> None:
        region = offer.name.partition("/")[0]
        if region not in self._config.regions:
            raise ProvisionerError(f"{self.name}: the region of offer {offer.name!r} is not configured")
        await self._call(region, "run instances", lambda region: self._provision(region, offer, token))

    async def status(self) -> list[Machine]:
        machines: list[Machine] = []
        for region, result in (await self._in_all_regions("describe instances", self._status)).items():
            if isinstance(result, ProvisionerError):
                # Without any earlier answer, "no machines" would be a guess: the autoscaler would buy them again.
                if region not in self._last_status:
                    raise result
                reason = f"last known state: {result}"
                machines += [msgspec.structs.replace(one, reason=reason) for one in self._last_status[region]]
            else:
                self._last_status[region] = result
                machines += result
        return machines

    async def terminate(self, machine: Machine) -> None:
        region, _, instance = machine.id.partition("/")
        if region not in self._slots:
            raise ProvisionerError(f"{self.name}: the region of machine {machine.id!r} is not configured")
        await self._call(region, "terminate instances", lambda region: self._terminate(region, instance))

    async def close(self) -> None:
        pass

    async def _in_all_regions(self, action: str, call: Callable[[str], T]) -> dict[str, T | ProvisionerError]:
        async def in_region(region: str) -> T | ProvisionerError:
            try:
                return await self._call(region, action, call)
            except ProvisionerError as error:
                return error

        regions = self._config.regions
        return dict(zip(regions, await asyncio.gather(*map(in_region, regions)), strict=True))

    async def _call(self, region: str, action: str, call: Callable[[str], T]) -> T:
        try:
            async with asyncio.timeout(self._config.timeout_s):
                return await run_in_thread(lambda: call(region), self.name, self._slots[region])
        except (TimeoutError, ReadTimeoutError):
            limit = f"{self._config.timeout_s:g} s"
            raise ProvisionerTimeout(f"{self.name}: {region}: {action} took longer than {limit}") from None
        except ClientError as error:
            code, message = error.response["Error"].get("Code", ""), error.response["Error"].get("Message", "")
            kind = NoCapacity if code in NO_CAPACITY else ProvisionerError
            raise kind(f"{self.name}: {region}: {action}: {code}: {message}") from None
        except BotoCoreError as error:
            raise ProvisionerError(f"{self.name}: {region}: {action}: {error}") from None

    # The rest runs in threads.

    def _client(self, region: str) -> Any:
        """Return the region's client. Threads may share clients, but not the session that creates them."""
        with self._session_lock:
            client = self._clients.get(region)
            if client is None:
                limits = BotoConfig(
                    connect_timeout=min(5.0, self._config.timeout_s),
                    read_timeout=self._config.timeout_s,
                    # boto3 retries four times with pauses by default. The control loop asks again anyway.
                    retries={"mode": "standard", "max_attempts": 2},
                )
                client = self._clients[region] = self._session.client(
                    "ec2", region_name=region, endpoint_url=self._config.endpoint_url or None, config=limits
                )
            return client

    def _list(self, region: str, operation: str, key: str, **arguments: Any) -> Iterator[dict[str, Any]]:
        """Yield the entries of all pages of an answer."""
        for page in self._client(region).get_paginator(operation).paginate(**arguments):
            yield from page[key]

    def _offers(self, region: str) -> tuple[list[Offer], list[str]]:
        """Return the region's offers, and a sentence for each instance type without a price."""
        config = self._config
        offers, problems = [], []
        gpus = self._gpus_in(region)
        spot_prices = self._spot_prices(region) if "spot" in config.markets else {}
        for instance_type in config.instance_types:
            if instance_type not in gpus:
                continue  # the region does not have it
            gpu, count = gpus[instance_type]
            for market in config.markets:
                spot = market == "spot"
                name = f"{region}/{instance_type}" + ("/spot" if spot else "")
                usd = self._price(region, instance_type, spot, spot_prices)
                if usd is None:
                    problems.append(f"offer {name!r} has no price: dropped (set provisioners.prices)")
                    continue
                known = {"gpu": config.gpu or gpu, "gpus": count, "spot": spot, "usd_per_hour": usd}
                offers.append(configured_offer(config, name, f"aws/{region}", **known))
        return offers, problems

    def _price(self, region: str, instance_type: str, spot: bool, spot_prices: dict[str, float]) -> float | None:
        prices, name = self._config.prices, instance_type + ("/spot" if spot else "")
        market_price = spot_prices.get(instance_type) if spot else None
        return prices.get(f"{region}/{name}", prices.get(name, market_price))

    def _gpus_in(self, region: str) -> dict[str, tuple[str, int]]:
        """Return the GPU and the number of GPUs of each instance type that the region has. The router asks once."""
        if region in self._gpus:
            return self._gpus[region]
        wanted = [{"Name": "instance-type", "Values": list(self._config.instance_types)}]
        offerings = self._list(region, "describe_instance_type_offerings", "InstanceTypeOfferings", Filters=wanted)
        names = sorted({one["InstanceType"] for one in offerings})
        found: dict[str, tuple[str, int]] = {}
        if names:
            for one in self._list(region, "describe_instance_types", "InstanceTypes", InstanceTypes=names):
                gpus = one.get("GpuInfo", {}).get("Gpus", [])
                found[one["InstanceType"]] = (
                    (gpus[0]["Name"], sum(gpu["Count"] for gpu in gpus)) if gpus else ("cpu", self._config.gpus)
                )
        self._gpus[region] = found
        return found

    def _spot_prices(self, region: str) -> dict[str, float]:
        """Return the lowest of the zones' latest prices by instance type."""
        latest: dict[tuple[str, str], tuple[datetime, float]] = {}
        wanted = {"InstanceTypes": list(self._config.instance_types), "ProductDescriptions": ["Linux/UNIX"]}
        since = datetime.now(UTC) - timedelta(hours=1)
        for one in self._list(region, "describe_spot_price_history", "SpotPriceHistory", StartTime=since, **wanted):
            try:
                usd = float(one["SpotPrice"])
            except ValueError:
                continue
            where = one["InstanceType"], one.get("AvailabilityZone", "")
            if where not in latest or one["Timestamp"] > latest[where][0]:
                latest[where] = one["Timestamp"], usd
        prices: dict[str, float] = {}
        for (instance_type, _zone), (_when, usd) in latest.items():
            prices[instance_type] = min(usd, prices.get(instance_type, usd))
        return prices

    def _provision(self, region: str, offer: Offer, token: str) -> None:
        # AWS remembers a client token for a day; the tag stays as long as the instance.
        if any(True for _ in self._instances(region, token)):
            return
        _region, instance_type, *market = offer.name.split("/")
        deployment = self._config.deployment
        tags = {"Name": f"{deployment}-{token}", DEPLOYMENT: deployment, TOKEN: token, OFFER: offer.name}
        tag_list = [{"Key": key, "Value": value} for key, value in tags.items()]
        request: dict[str, Any] = {
            "MinCount": 1,
            "MaxCount": 1,
            "InstanceType": instance_type,
            "ClientToken": hashlib.sha256(f"{deployment}/{token}".encode()).hexdigest(),
            "TagSpecifications": [{"ResourceType": "instance", "Tags": tag_list}],
            # A machine that shuts itself down (a crash of its start script) must not stay as a stopped one, whose disks
            # are paid for.
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
                # A persistent request would start a new instance after each reclaim, without being asked.
                "SpotOptions": {"SpotInstanceType": "one-time", "InstanceInterruptionBehavior": "terminate"},
            }
        self._client(region).run_instances(**request)

    def _instances(self, region: str, token: str = "") -> Iterator[dict[str, Any]]:
        """Yield the deployment's instances, or the one with this token. AWS lists terminated ones for about an hour."""
        filters = [{"Name": f"tag:{DEPLOYMENT}", "Values": [self._config.deployment]}]
        if token:
            filters.append({"Name": f"tag:{TOKEN}", "Values": [token]})
        for reservation in self._list(region, "describe_instances", "Reservations", Filters=filters):
            yield from reservation["Instances"]

    def _status(self, region: str) -> list[Machine]:
        instances = list(self._instances(region))
        reclaimed = self._reclaim_reasons(region, instances)
        return [self._machine(region, one, reclaimed.get(one["InstanceId"], "")) for one in instances]

    def _reclaim_reasons(self, region: str, instances: list[dict[str, Any]]) -> dict[str, str]:
        """Return the reason for each spot instance that AWS takes back."""
        requests = [
            one["SpotInstanceRequestId"]
            for one in instances
            if one.get("SpotInstanceRequestId") and one["State"]["Name"] != "terminated"
        ]
        found: dict[str, str] = {}
        for at in range(0, len(requests), MAX_FILTER_VALUES):
            some = [{"Name": "spot-instance-request-id", "Values": requests[at : at + MAX_FILTER_VALUES]}]
            for one in self._list(region, "describe_spot_instance_requests", "SpotInstanceRequests", Filters=some):
                status = one.get("Status") or {}
                if status.get("Code") in RECLAIM_CODES:
                    found[one.get("InstanceId", "")] = status.get("Message") or status["Code"]
        return found

    def _machine(self, region: str, instance: dict[str, Any], reclaim_reason: str) -> Machine:
        tags = {tag["Key"]: tag["Value"] for tag in instance.get("Tags", ())}
        state_name = instance["State"]["Name"]
        state = STATES.get(state_name, MachineState.PENDING)
        stopped = f"it is {state_name}" if state_name in STOPPED else ""
        address = instance.get("PublicIpAddress" if self._config.address == "public" else "PrivateIpAddress") or ""
        # EC2 says `running` before the public address is there.
        if state is MachineState.RUNNING and not address:
            state = MachineState.PENDING
        return Machine(
            id=f"{region}/{instance['InstanceId']}",
            token=tags.get(TOKEN, ""),
            offer=tags.get(OFFER, ""),
            state=state,
            url=f"http://{address}:{self._config.port}" if address else "",
            reclaimed=bool(reclaim_reason or stopped) or RECLAIMED in tags,
            reason=reclaim_reason or tags.get(RECLAIMED, "") or instance.get("StateTransitionReason", "") or stopped,
            island=self._config.island or f"aws/{region}",
        )

    def _terminate(self, region: str, instance: str) -> None:
        try:
            self._client(region).terminate_instances(InstanceIds=[instance])
        except ClientError as error:
            if error.response["Error"].get("Code") not in NOT_FOUND:
                raise
