"""command: the operator's own program. It is run with one of four words after it, reads JSON on its standard input and
writes JSON on its standard output:

    PROGRAM offers     ← {"deployment": …}                       → {"offers": [{"name", "gpu", "usd_per_hour", …}]}
    PROGRAM provision  ← {"deployment", "offer": {…}, "token"}
    PROGRAM status     ← {"deployment": …}                       → {"machines": [{"id", "token", "offer", "state", …}]}
    PROGRAM terminate  ← {"deployment", "machine": {…}}

Exit 0 means done, 75 (EX_TEMPFAIL) that there is no capacity now, anything else that it failed; the last line on
standard error says why.
"""

from __future__ import annotations

from typing import Any

import msgspec

from warmroute.config import ProvisionerConfig
from warmroute.scaling.offer import Offer
from warmroute.scaling.provisioner import CloudError, Machine, NoCapacity
from warmroute.scaling.provisioners import answers, child
from warmroute.scaling.provisioners.configured import sanity_of

NO_CAPACITY = 75


class CommandProvisioner:
    def __init__(self, config: ProvisionerConfig) -> None:
        self.name = config.label
        self._config = config
        self._sanity = sanity_of(config)

    async def offers(self) -> list[Offer]:
        return self._sanity.check(*answers.offers(await self._run("offers"), self._config))

    async def provision(self, offer: Offer, token: str) -> None:
        await self._run("provision", offer=offer, token=token)

    async def status(self) -> list[Machine]:
        return answers.machines(await self._run("status"), self.name)

    async def terminate(self, machine: Machine) -> None:
        await self._run("terminate", machine=machine)

    async def close(self) -> None:
        pass

    async def _run(self, verb: str, **what: Any) -> bytes:
        told = msgspec.json.encode({"deployment": self._config.deployment, **what})
        said = await child.run([*self._config.command, verb], self.name, timeout_s=self._config.timeout_s, stdin=told)
        if said.code == NO_CAPACITY:
            raise NoCapacity(f"{self.name}: no capacity: {said.last_line}")
        if said.code:
            raise CloudError(f"{self.name}: {verb} failed (exit {said.code}): {said.last_line}")
        return said.out
