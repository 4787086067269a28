"""webhook: the same four calls as `command`, posted to the operator's own service as JSON:

    POST URL/offers, URL/provision, URL/status, URL/terminate

2xx means done. 429, 503 and 507 on `provision` mean that there is no capacity now; anything else that it failed, and
the answer's `error` says why. A bearer token comes from the environment; redirects are not followed, so that it stays
there.
"""

from __future__ import annotations

import asyncio
import http.client
import os
import ssl
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import msgspec

from warmroute.config import ConfigError, ProvisionerConfig
from warmroute.scaling.offer import Offer
from warmroute.scaling.provisioner import CloudError, Machine, NoCapacity
from warmroute.scaling.provisioners import answers
from warmroute.scaling.provisioners.configured import sanity_of

NO_CAPACITY = (429, 503, 507)
MOST_BYTES = 64 << 20


class WebhookProvisioner:
    def __init__(self, config: ProvisionerConfig) -> None:
        self.name = config.label
        self._config = config
        self._sanity = sanity_of(config)
        self._threads = ThreadPoolExecutor(4, f"warmroute-{config.label}")  # its own: it may hang, others must not
        self._url = urlsplit(config.url.rstrip("/"))
        if not self._url.hostname:
            raise ConfigError(f"provisioners.url: {config.url!r} has no host")
        self._headers = {"content-type": "application/json", "accept": "application/json"}
        if config.token_env:
            token = os.environ.get(config.token_env, "")
            if not token:
                raise ConfigError(f"provisioners.token_env: the environment has no {config.token_env}")
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
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _post(self, verb: str, **what: Any) -> bytes:
        body = msgspec.json.encode({"deployment": self._config.deployment, **what})
        try:
            async with asyncio.timeout(self._config.timeout_s):
                status, answer = await asyncio.get_running_loop().run_in_executor(
                    self._threads, self._post_blocking, f"{self._url.path}/{verb}", body
                )
        except TimeoutError:
            raise CloudError(f"{self.name}: {verb} took longer than {self._config.timeout_s:g} s") from None
        except (OSError, http.client.HTTPException) as error:
            raise CloudError(f"{self.name}: {verb} failed: {error or type(error).__name__}") from None
        if 200 <= status < 300:
            return answer
        sentence = f"{self.name}: {verb} was answered with {status}: {_why(answer)}"
        raise (NoCapacity if verb == "provision" and status in NO_CAPACITY else CloudError)(sentence)

    def _post_blocking(self, path: str, body: bytes) -> tuple[int, bytes]:
        """In a thread. Its own limit is on each read, so that the thread ends soon after the call has been given up."""
        assert self._url.hostname is not None
        connection: http.client.HTTPConnection
        if self._url.scheme == "https":
            connection = http.client.HTTPSConnection(
                self._url.hostname, self._url.port, timeout=self._config.timeout_s, context=ssl.create_default_context()
            )
        else:
            connection = http.client.HTTPConnection(self._url.hostname, self._url.port, timeout=self._config.timeout_s)
        try:
            connection.request("POST", path, body, self._headers)
            response = connection.getresponse()
            answer = response.read(MOST_BYTES)
        finally:
            connection.close()
        return response.status, answer


def _why(answer: bytes) -> str:
    try:
        said = msgspec.json.decode(answer, type=dict[str, Any]).get("error")
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError):
        said = None
    if isinstance(said, dict):
        said = said.get("message")
    return said if isinstance(said, str) else answers.beginning(answer)
