"""The JSON that the `command` and `webhook` provisioners exchange with the operator's program or service.

A call is an object, and so is its answer:

call        sent, beside `protocol`, `call`, `deployment`    answer
---------   ----------------------------------------------   --------------------------------------------------------
offers                                                       {"offers": [{"name", "gpu", "usd_per_hour", …}]}
provision   {"offer": {…}, "token"}                          {}
status                                                       {"machines": [{"id", "token", "offer", "state", …}]}
terminate   {"machine": {…}}                                 {}

The router sends an offer or a machine back exactly as it was reported, fields included that the router does not know.
Every answer may be {"error": {"code", "message"}} instead; the code `no_capacity` makes the offer back off.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

import msgspec

from warmroute.config import ProvisionerConfig
from warmroute.scaling.offer import Offer, OfferValidator
from warmroute.scaling.provisioner import Machine, NoCapacity, ProvisionerError

PROTOCOL: Final = 1
"""Changes if a program that follows the old one would fail."""
NO_CAPACITY: Final = "no_capacity"

Send = Callable[[str, bytes], Awaitable[bytes]]
"""Sends a call's name and body, and returns the answer. Raises ProvisionerError."""


class JsonProvisioner:
    """The Provisioner protocol over `send`."""

    def __init__(self, config: ProvisionerConfig, send: Send) -> None:
        self.name = config.label
        self._config = config
        self._send = send
        self._validator = OfferValidator(config)
        self._reported_offers: dict[str, dict[str, Any]] = {}
        self._reported_machines: dict[str, dict[str, Any]] = {}
        """What the latest answers contained, by name and by id."""

    async def offers(self) -> list[Offer]:
        entries = _entries(await self._call("offers"), "offers", self.name)
        offers = self._validator.validate(*parse_offers(entries, self._config))
        self._reported_offers = {entry["name"]: entry for entry in reversed(entries) if _has_name(entry)}
        return offers

    async def provision(self, offer: Offer, token: str) -> None:
        await self._call("provision", offer=self._reported_offers.get(offer.name, offer), token=token)

    async def status(self) -> list[Machine]:
        entries = _entries(await self._call("status"), "machines", self.name)
        machines = parse_machines(entries, self.name)
        self._reported_machines = {entry["id"]: entry for entry in entries}
        return machines

    async def terminate(self, machine: Machine) -> None:
        await self._call("terminate", machine=self._reported_machines.get(machine.id, machine))

    async def close(self) -> None:
        pass

    async def _call(self, call: str, **fields: Any) -> bytes:
        body = {"protocol": PROTOCOL, "call": call, "deployment": self._config.deployment, **fields}
        answer = await self._send(call, msgspec.json.encode(body))
        raise_reported_error(answer, f"{self.name}: {call}")
        return answer


def raise_reported_error(answer: bytes, what: str, *, no_capacity: bool = False) -> None:
    """Raise the `error` of an answer, if it has one: text, or an object with a message and a code. `no_capacity`: the
    transport said so."""
    try:
        error = msgspec.json.decode(answer, type=dict[str, Any]).get("error")
    except (ValueError, RecursionError):
        return
    if not error:
        return
    code, message = (error.get("code"), error.get("message")) if isinstance(error, dict) else (None, error)
    kind = NoCapacity if no_capacity or code == NO_CAPACITY else ProvisionerError
    raise kind(f"{what}: {str(message or code)[:300]}")


def parse_offers(entries: list[Any], config: ProvisionerConfig) -> tuple[list[Offer], list[str]]:
    """Return the offers, and a sentence for each invalid entry, which does not affect the others."""
    offers: list[Offer] = []
    problems: list[str] = []
    defaults = {"island": config.island or config.label, "gpus": 1, "role": config.role}
    defaults["bootstrap_port"] = config.bootstrap_port
    for entry in entries:
        if not isinstance(entry, dict):
            problems.append(f"dropping an offer that is not an object: {entry!r:.60}")
            continue
        try:
            offers.append(msgspec.convert(defaults | entry | {"provisioner": config.label}, Offer))
        except msgspec.ValidationError as error:
            problems.append(f"dropping offer {str(entry.get('name'))[:60]!r}: {error}")
    return offers, problems


def parse_machines(entries: list[Any], provisioner: str) -> list[Machine]:
    """Return the machines. An invalid entry is an error: without it, the router would take the machine for gone."""
    try:
        return msgspec.convert(entries, list[Machine])
    except msgspec.ValidationError as error:
        raise ProvisionerError(f"{provisioner}: invalid machine in the answer: {error}") from None


def _has_name(entry: Any) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get("name"), str)


def _entries(answer: bytes, key: str, provisioner: str) -> list[Any]:
    try:
        decoded = msgspec.json.decode(answer)
    except (ValueError, RecursionError) as error:
        raise ProvisionerError(f"{provisioner}: the answer is not JSON ({error}): {excerpt(answer)}") from None
    found = decoded.get(key) if isinstance(decoded, dict) else None
    if not isinstance(found, list):
        raise ProvisionerError(f'{provisioner}: the answer is not like {{"{key}": […]}}: {excerpt(answer)}')
    return found


def excerpt(answer: bytes) -> str:
    """Return the start of an answer, for an error message."""
    return repr(answer[:80].decode(errors="replace"))
