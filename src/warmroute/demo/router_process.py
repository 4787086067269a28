"""The router as a child process, with a configuration written for it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from warmroute.config import ConfigError
from warmroute.demo.chat_client import Unanswered, send_request
from warmroute.demo.child_processes import Child, Children, free_port

HOST = "127.0.0.1"
START_LIMIT_S = 60.0
"""For a router to be ready, on a machine that is busy with other things."""
FIRST_ADMIN_PORT = 8181


class RouterProcess:
    """One that is ready."""

    def __init__(self, child: Child, port: int, admin_port: int) -> None:
        self.child = child
        self.port = port
        self.admin_port = admin_port

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    @property
    def admin_url(self) -> str:
        return f"http://{HOST}:{self.admin_port}"

    async def tell(self, path: str) -> Any:
        """What its admin listener answers. Raises ConfigError where it does not."""
        try:
            status, body = await send_request(HOST, self.admin_port, "GET", path)
        except (OSError, Unanswered) as error:
            if self.child.has_ended():
                raise ConfigError(f"the router has ended (exit {self.child.process.returncode})") from None
            raise ConfigError(f"the router's admin listener does not answer: {error}") from None
        if status != 200:
            raise ConfigError(f"the router's admin listener says {status} to {path}")
        return msgspec.json.decode(body)


async def start_router(children: Children, folder: Path, port: int, tables: Mapping[str, Any]) -> RouterProcess:
    """Returns when it is ready to take requests. Raises ConfigError where it does not come to that."""
    admin_port = free_port(max(FIRST_ADMIN_PORT, port + 1))
    own = {"listen": {"host": HOST, "port": port}, "admin": {"port": admin_port}}
    file = folder / f"router-{port}.toml"
    file.write_text(as_toml({**own, **tables}), encoding="utf-8")
    child = children.start("serve", "--config", str(file))
    try:
        async with asyncio.timeout(START_LIMIT_S):
            while True:
                await asyncio.sleep(0.05)
                if child.has_ended():
                    raise ConfigError(child.start_error())
                try:
                    status, _ = await send_request(HOST, port, "GET", "/ready")
                except (OSError, Unanswered):
                    continue
                if status == 200:
                    return RouterProcess(child, port, admin_port)
    except BaseException as error:
        children.end(child)
        if isinstance(error, TimeoutError):
            raise ConfigError(f"the router was not ready within {START_LIMIT_S:g} s") from None
        raise


def as_toml(tables: Mapping[str, Any]) -> str:
    """Tables of plain values, and lists of such tables. JSON's strings, numbers, booleans and lists are TOML's, too."""
    lines: list[str] = []
    for name, content in tables.items():
        several = isinstance(content, list)
        for table in content if several else (content,):
            head = f"[[{name}]]" if several else f"[{name}]"
            lines += [head, *(f"{key} = {msgspec.json.encode(value).decode()}" for key, value in table.items()), ""]
    return "\n".join(lines)
