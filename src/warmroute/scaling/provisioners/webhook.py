"""webhook: the same four calls as `command`, posted to the operator's own service as JSON:

    POST URL/offers, URL/provision, URL/status, URL/terminate

2xx means done, unless the answer has an `error`. 429, 503 and 507 on `provision` mean that there is no capacity now;
anything else that it failed, and `error` says why. A bearer token comes from the environment; redirects are not
followed, so that it stays there. A call has one limit from its beginning to its end, however slowly the answer comes.
"""

from __future__ import annotations

import asyncio
import http.client
import os
import socket
import ssl
import threading
from typing import Any
from urllib.parse import SplitResult, urlsplit

import msgspec

from warmroute.blocking import aside
from warmroute.config import ConfigError, ProvisionerConfig
from warmroute.scaling.offer import Offer
from warmroute.scaling.provisioner import CloudError, Machine, NoAnswer, NoCapacity
from warmroute.scaling.provisioners import answers
from warmroute.scaling.provisioners.configured import sanity_of

NO_CAPACITY = (429, 503, 507)
MOST_BYTES = 64 << 20
AT_ONCE = 8
"""Calls at once, those counted that were given up and whose threads have not ended yet."""


class WebhookProvisioner:
    def __init__(self, config: ProvisionerConfig) -> None:
        self.name = config.label
        self._config = config
        self._sanity = sanity_of(config)
        self._places = asyncio.Semaphore(AT_ONCE)
        self._url = urlsplit(config.url.rstrip("/"))
        if not self._url.hostname:
            raise ConfigError(f"provisioners.url: {config.url!r} has no host")
        try:
            _ = self._url.port
        except ValueError as error:
            raise ConfigError(f"provisioners.url: {config.url!r}: {error}") from None
        self._tls = ssl.create_default_context() if self._url.scheme == "https" else None
        self._headers = {"content-type": "application/json", "accept": "application/json"}
        if config.token_env:
            token = os.environ.get(config.token_env, "").strip()
            if not token:
                raise ConfigError(f"provisioners.token_env: the environment has no {config.token_env}")
            if not (token.isascii() and token.isprintable()):
                raise ConfigError(f"provisioners.token_env: {config.token_env} has characters that no header may have")
            self._headers["authorization"] = f"Bearer {token}"

    async def offers(self) -> list[Offer]:
        return self._sanity.check(*answers.offers(await self._post("offers"), self._config))

    async def provision(self, offer: Offer, token: str) -> None:
        await self._post("provision", offer=offer, token=token)

    async def status(self) -> list[Machine]:
        return answers.machines(await self._post("status"), self.name)

    async def terminate(self, machine: Machine) -> None:
        await self._post("terminate", machine=machine)

    async def close(self) -> None:
        pass

    async def _post(self, verb: str, **what: Any) -> bytes:
        body = msgspec.json.encode({"deployment": self._config.deployment, **what})
        post = _Post(self._url, self._tls, self._config.timeout_s)
        try:
            async with asyncio.timeout(self._config.timeout_s):
                status, answer = await aside(lambda: post.run(verb, body, self._headers), self.name, self._places)
        except TimeoutError:
            raise NoAnswer(f"{self.name}: {verb} took longer than {self._config.timeout_s:g} s") from None
        except (OSError, http.client.HTTPException) as error:
            raise CloudError(f"{self.name}: {verb} failed: {error or type(error).__name__}") from None
        finally:
            post.give_up()
        if len(answer) > MOST_BYTES:
            raise CloudError(f"{self.name}: {verb} was answered with more than {MOST_BYTES >> 20} MiB")
        if 200 <= status < 300 and not _error_in(answer):
            return answer
        sentence = f"{self.name}: {verb} was answered with {status}: {_why(answer)}"
        raise (NoCapacity if verb == "provision" and status in NO_CAPACITY else CloudError)(sentence)


class _Post:
    """One call, in a thread. Whoever gives it up cuts its connection, and then the thread ends, whatever it waits for:
    limits of a socket are for each read of it, and one that trickles keeps to them for ever."""

    def __init__(self, url: SplitResult, tls: ssl.SSLContext | None, timeout_s: float) -> None:
        self._url = url
        self._tls = tls
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._given_up = False
        self._handle: socket.socket | None = None
        """The connection a second time: whatever the thread does with its own, this stays what it is."""

    def run(self, verb: str, body: bytes, headers: dict[str, str]) -> tuple[int, bytes]:
        host, port = self._url.hostname or "", self._url.port
        connection: http.client.HTTPConnection
        if self._tls is not None:
            connection = http.client.HTTPSConnection(host, port, context=self._tls)
        else:
            connection = http.client.HTTPConnection(host, port)
        try:
            connection.sock = self._connected(host, connection.port)
            connection.request("POST", f"{self._url.path}/{verb}", body, headers)
            response = connection.getresponse()
            return response.status, response.read(MOST_BYTES + 1)
        finally:
            connection.close()

    def _connected(self, host: str, port: int) -> socket.socket:
        raw = socket.create_connection((host, port), self._timeout_s)
        try:
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                if self._given_up:
                    raise TimeoutError
                self._handle = raw.dup()
            return self._tls.wrap_socket(raw, server_hostname=host) if self._tls is not None else raw
        except BaseException:
            raw.close()
            raise

    def give_up(self) -> None:
        """Also when it is over: then there is nothing left to cut."""
        with self._lock:
            self._given_up = True
            handle, self._handle = self._handle, None
        if handle is None:
            return
        try:
            handle.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the other side has gone
        handle.close()


def _error_in(answer: bytes) -> Any:
    """What it gives as its error, if it does."""
    try:
        return msgspec.json.decode(answer, type=dict[str, Any]).get("error")
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError):
        return None


def _why(answer: bytes) -> str:
    said = _error_in(answer)
    if isinstance(said, dict):
        said = said.get("message")
    return said if isinstance(said, str) else answers.beginning(answer)
