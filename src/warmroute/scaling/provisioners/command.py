"""command: the operator's own program. The router runs `PROGRAM offers`, `provision`, `status` or `terminate`; the
program reads JSON from standard input and writes JSON to standard output (json_protocol.py).

Exit code 0 means success, 75 (EX_TEMPFAIL) no capacity, any other a failure. The last line on standard error says why.
"""

from __future__ import annotations

from warmroute.config import ProvisionerConfig
from warmroute.scaling.provisioner import NoCapacity, ProvisionerError
from warmroute.scaling.provisioners.command_runner import run_command
from warmroute.scaling.provisioners.json_protocol import JsonProvisioner

NO_CAPACITY = 75


def command_provisioner(config: ProvisionerConfig) -> JsonProvisioner:
    name = config.label

    async def send(call: str, body: bytes) -> bytes:
        result = await run_command([*config.command, call], name, timeout_s=config.timeout_s, stdin=body)
        if result.code == NO_CAPACITY:
            raise NoCapacity(f"{name}: no capacity: {result.last_line}")
        if result.code:
            raise ProvisionerError(f"{name}: {call} failed (exit code {result.code}): {result.last_line}")
        return result.out

    return JsonProvisioner(config, send)
