"""The JSON that the `command` and `webhook` provisioners exchange with the operator's program or service.

call        sent                                         answer
---------   ------------------------------------------   -----------------------------------------------------------
offers      {"deployment"}                               {"offers": [{"name", "gpu", "usd_per_hour", …}]}
provision   {"deployment", "offer": {…}, "token"}
status      {"deployment"}                               {"machines": [{"id", "token", "offer", "state", …}]}
terminate   {"deployment", "machine": {…}}
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from warmroute.config import ProvisionerConfig
from warmroute.scaling.offer import Offer, OfferValidator
from warmroute.scaling.provisioner import Machine, ProvisionerError

Send = Callable[[str, bytes], Awaitable[bytes]]
"""Sends a call's name and body, and returns the answer. Raises ProvisionerError."""


class JsonProvisioner:
    """The Provisioner protocol over `send`."""

    def __init__(self, config: ProvisionerConfig, send: Send) -> None:
        self.name = config.label
        self._config = config
        self._send = send
        self._validator = OfferValidator(config)

    async def offers(self) -> list[Offer]:
        return self._validator.validate(*parse_offers(await self._call("offers"), self._config))

    async def provision(self, offer: Offer, token: str) -> None:
        await self._call("provision", offer=offer, token=token)

    async def status(self) -> list[Machine]:
        return parse_machines(await self._call("status"), self.name)

    async def terminate(self, machine: Machine) -> None:
        await self._call("terminate", machine=machine)

    async def close(self) -> None:
        pass

    async def _call(self, call: str, **fields: Any) -> bytes:
        return await self._send(call, msgspec.json.encode({"deployment": self._config.deployment, **fields}))


def parse_offers(answer: bytes, config: ProvisionerConfig) -> tuple[list[Offer], list[str]]:
    """Return the offers, and a sentence for each invalid entry, which does not affect the others."""
    offers: list[Offer] = []
    problems: list[str] = []
    defaults = {"island": config.island or config.label, "gpus": 1}
    for entry in _entries(answer, "offers", config.label):
        if not isinstance(entry, dict):
            problems.append(f"dropping an offer that is not an object: {entry!r:.60}")
            continue
        try:
            offers.append(msgspec.convert(defaults | entry | {"provisioner": config.label}, Offer))
        except msgspec.ValidationError as error:
            problems.append(f"dropping offer {str(entry.get('name'))[:60]!r}: {error}")
    return offers, problems


def parse_machines(answer: bytes, provisioner: str) -> list[Machine]:
    """Return the machines. An invalid entry is an error: without it, the router would take the machine for gone."""
    try:
        return msgspec.convert(_entries(answer, "machines", provisioner), list[Machine])
    except msgspec.ValidationError as error:
        raise ProvisionerError(f"{provisioner}: invalid machine in the answer: {error}") from None


def _entries(answer: bytes, key: str, provisioner: str) -> list[Any]:
    try:
        decoded = msgspec.json.decode(answer)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProvisionerError(f"{provisioner}: the answer is not JSON ({error}): {excerpt(answer)}") from None
    found = decoded.get(key) if isinstance(decoded, dict) else None
    if not isinstance(found, list):
        raise ProvisionerError(f'{provisioner}: the answer is not like {{"{key}": […]}}: {excerpt(answer)}')
    return found


def excerpt(answer: bytes) -> str:
    """Return the start of an answer, for an error message."""
    return repr(answer[:80].decode(errors="replace"))
