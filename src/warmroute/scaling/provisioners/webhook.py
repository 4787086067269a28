"""webhook: the operator's own service. The router posts JSON (json_protocol.py) to URL/offers, URL/provision,
URL/status and URL/terminate.

2xx means success, unless the answer has an `error`. 429, 503 and 507 on `provision` mean no capacity. Any other status
is a failure. The bearer token comes from the environment. The router follows no redirects, so
that the token stays with this service.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from urllib.parse import urlsplit

from warmroute.config import ConfigError, ProvisionerConfig
from warmroute.http_client import request
from warmroute.scaling.provisioner import NoCapacity, ProvisionerError, ProvisionerTimeout
from warmroute.scaling.provisioners.json_protocol import JsonProvisioner, excerpt, raise_reported_error

NO_CAPACITY = (429, 503, 507)
MAX_ANSWER_BYTES = 64 << 20
MAX_CONCURRENT_CALLS = 8


def webhook_provisioner(config: ProvisionerConfig) -> JsonProvisioner:
    """Raises ConfigError if the URL or the token is invalid."""
    name, timeout_s, url = config.label, config.timeout_s, config.url.rstrip("/")
    tls = ssl.create_default_context() if _is_https(url) else None
    headers = {"Accept": "application/json"} | _authorization(config.token_env)
    slots = asyncio.Semaphore(MAX_CONCURRENT_CALLS)

    async def send(call: str, body: bytes) -> bytes:
        try:
            async with asyncio.timeout(timeout_s), slots:
                status, answer = await request(
                    "POST",
                    f"{url}/{call}",
                    body,
                    headers.items(),
                    timeout_s=timeout_s,
                    limit_bytes=MAX_ANSWER_BYTES,
                    tls=tls,
                )
        except TimeoutError:
            raise ProvisionerTimeout(f"{name}: {call} took longer than {timeout_s:g} s") from None
        except OSError as error:
            raise ProvisionerError(f"{name}: {call} failed: {error or type(error).__name__}") from None
        if 200 <= status < 300:
            return answer
        no_capacity = call == "provision" and status in NO_CAPACITY
        raise_reported_error(answer, f"{name}: {call} returned status {status}", no_capacity=no_capacity)
        kind = NoCapacity if no_capacity else ProvisionerError
        raise kind(f"{name}: {call} returned status {status}: {excerpt(answer)}")

    return JsonProvisioner(config, send)


def _is_https(url: str) -> bool:
    parts = urlsplit(url)
    try:
        _ = parts.port
    except ValueError as error:
        raise ConfigError(f"provisioners.url: {url!r}: {error}") from None
    if not parts.hostname:
        raise ConfigError(f"provisioners.url: {url!r} has no host")
    return parts.scheme == "https"


def _authorization(token_env: str) -> dict[str, str]:
    if not token_env:
        return {}
    token = os.environ.get(token_env, "").strip()
    if not token:
        raise ConfigError(f"provisioners.token_env: the environment variable {token_env} is not set")
    if not (token.isascii() and token.isprintable()):
        raise ConfigError(f"provisioners.token_env: {token_env} has characters that an HTTP header must not have")
    return {"Authorization": f"Bearer {token}"}
