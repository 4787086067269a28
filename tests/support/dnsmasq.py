"""Debian's dnsmasq on loopback (tools/fetch_dnsmasq.sh): a DNS server of another project."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from support.free_port import free_port

PROGRAM = Path(__file__).resolve().parents[2] / ".venv-deploy" / "dnsmasq" / "dnsmasq"
NAME = "engines.test"


class Dnsmasq:
    def __init__(self, folder: Path, process: asyncio.subprocess.Process, port: int) -> None:
        self.address = f"127.0.0.1:{port}"
        self._folder = folder
        self._process = process

    def set_hosts(self, hosts: list[str]) -> None:
        """Give the name, and the hosts of its SRV records, these addresses."""
        (self._folder / "hosts").write_text(
            "".join(f"{host} {NAME} e{number}.test\n" for number, host in enumerate(hosts))
        )
        self._process.send_signal(signal.SIGHUP)


@asynccontextmanager
async def dnsmasq(folder: Path, srv_port: int) -> AsyncIterator[Dnsmasq]:
    assert PROGRAM.exists(), "`make test-deploy` fetches dnsmasq"
    port = free_port()
    (folder / "hosts").write_text("")
    process = await asyncio.create_subprocess_exec(
        str(PROGRAM), "--no-daemon", "--conf-file=/dev/null", f"--port={port}", "--listen-address=127.0.0.1",
        "--bind-interfaces", "--no-resolv", "--no-hosts", f"--addn-hosts={folder}/hosts", "--local=/test/",
        "--local-ttl=0", "--user=root", "--pid-file=",
        *(f"--srv-host=_http._tcp.{NAME},e{number}.test,{srv_port}" for number in range(5)),
        stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    await asyncio.sleep(0.3)
    try:
        assert process.returncode is None, "dnsmasq ended"
        yield Dnsmasq(folder, process, port)
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()
