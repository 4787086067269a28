"""Redis or Valkey: connections, and the lease of the process that scales with its fencing token."""

from __future__ import annotations

import asyncio
import os
import ssl
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from warmroute.config import Cluster, ConfigError, missing_extra, parse_redis_url
from warmroute.event_log import EventLog

# Connections to Redis or Valkey, alone or found through Sentinels.

Client = Any
"""A redis.asyncio.Redis. Its types differ between versions."""
TIMEOUT_S: Final = 1.0
"""Time for a connection, and for each reply."""


def import_redis() -> None:
    """Raises ConfigError if redis-py is not installed."""
    try:
        import redis.asyncio  # noqa: F401
    except ImportError as error:
        raise missing_extra("cluster.url", error, "redis") from None


def read_password(config: Cluster) -> str:
    """Return the password of the server; empty without one. Raises ConfigError."""
    if config.password_env:
        password = os.environ.get(config.password_env, "")
        if not password:
            name = config.password_env
            raise ConfigError(f"cluster.password_env: the environment variable {name} (the password) is not set")
        return password
    if config.password_file:
        try:
            return Path(config.password_file).expanduser().read_text("utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
            raise ConfigError(f"cluster.password_file: cannot read {config.password_file}: {reason}") from None
    return parse_redis_url(config.url).password


def check_cluster(config: Cluster) -> None:
    """Raises ConfigError if this machine lacks what the configuration needs."""
    import_redis()
    read_password(config)
    if config.sentinel_password_env and not os.environ.get(config.sentinel_password_env):
        name = config.sentinel_password_env
        raise ConfigError(f"cluster.sentinel_password_env: the environment variable {name} is not set")
    if config.ca_file:
        try:
            ssl.create_default_context(cafile=config.ca_file)
        except OSError as error:  # also ssl.SSLError
            raise ConfigError(f"cluster.ca_file: cannot read {config.ca_file}: {error.strerror or error}") from None


def create_client(config: Cluster) -> Client:
    """Return a client without connections yet. It retries nothing: its users do. Raises ConfigError."""
    from redis.asyncio import Redis
    from redis.asyncio import sentinel as sentinels
    from redis.asyncio.retry import Retry
    from redis.backoff import NoBackoff

    create_sentinel: Any = sentinels.Sentinel

    address = parse_redis_url(config.url)
    options: dict[str, Any] = {
        "db": address.database, "username": address.username or None, "password": read_password(config) or None,
        "socket_timeout": TIMEOUT_S, "socket_connect_timeout": TIMEOUT_S, "socket_keepalive": True,
        "retry": Retry(NoBackoff(), 0), "retry_on_error": [], "protocol": 2,
    }  # fmt: skip
    if address.tls:
        options |= {"ssl": True, "ssl_ca_certs": config.ca_file or None, "ssl_check_hostname": True}
    if not address.service:
        host, port = address.hosts[0]
        return Redis(host=host, port=port, **options)
    sentinel_options = {key: value for key, value in options.items() if key not in ("db", "username", "password")}
    if config.sentinel_password_env:
        sentinel_options["password"] = os.environ.get(config.sentinel_password_env)
    sentinel = create_sentinel(list(address.hosts), sentinel_kwargs=sentinel_options, **options)
    return sentinel.master_for(address.service)


async def end_tasks(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Cancel tasks until they have ended: redis-py may take a cancellation for the end of one of its own timeouts."""
    running = set(tasks)
    while running:
        for task in running:
            task.cancel()
        _, running = await asyncio.wait(running, timeout=0.05)


def describe_error(error: Exception) -> str:
    """Return why a command failed. redis-py puts a pipeline's command, with values, before the server's words."""
    text = str(error).split("\n")[0].rpartition("caused error: ")[2].strip("()',\" ")[:200]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


# The lease of the replica that scales the fleet, with a fencing token, and the autoscaler's state under it.
#
#     hash PREFIX:lease   holder and token; expires after the lease's length, unless its holder renews it
#     key  PREFIX:token   the last token: each new holder gets a higher one
#     key  PREFIX:scaling the autoscaler's state, which only the holder can write
#
# - A holder is the leader until its lease would end by its own clock, which it starts before it asks the server. So it
#   stops before the server lets another one in, also if it was suspended or cannot reach the server.
# - Before each action, the leader writes its state together with its token (`commit`). The server refuses it if another
#   holder has come, and then the action does not happen. What a leader still does after it was suspended just then, its
#   successor has read as intended.
# - A server that takes no writes renews no lease.
# - Another replica takes the lease when it has expired or was released. If it is gone earlier (the server was flushed),
#   the others wait until it would have expired.

log = EventLog("warmroute.cluster")

RENEWALS: Final = 5.0
"""How often a holder renews within one lease."""
HOLDS: Final = 0.8
"""The part of a lease for which its holder leads."""
EXPIRES: Final = 0.9
"""The part of a lease after which the server lets another one in: that one leads before the whole lease is over."""
STATE_TTL_S: Final = 7 * 86_400
"""A router that was gone for a week starts anew."""
MAX_STATE_BYTES: Final = 4 << 20

_TAKE: Final = """
local held = redis.call('HMGET', KEYS[1], 'holder', 'token')
if held[1] and held[1] ~= '' and held[1] ~= ARGV[1] then
  return {0, held[2], redis.call('PTTL', KEYS[1])}
end
if not held[1] and ARGV[4] == '0' then return {0, '0', 0} end
local token = held[2]
if held[1] ~= ARGV[1] then
  token = math.max(tonumber(redis.call('GET', KEYS[2]) or '0'), tonumber(ARGV[3])) + 1
  redis.call('SET', KEYS[2], token)
end
redis.call('HSET', KEYS[1], 'holder', ARGV[1], 'token', token)
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return {1, tostring(token), redis.call('GET', KEYS[3])}
"""
_COMMIT: Final = """
local held = redis.call('HMGET', KEYS[1], 'holder', 'token')
if held[1] ~= ARGV[1] or held[2] ~= ARGV[2] then return 0 end
redis.call('SET', KEYS[2], ARGV[3], 'EX', ARGV[4])
return 1
"""
_RELEASE: Final = """
if redis.call('HGET', KEYS[1], 'holder') == ARGV[1] then redis.call('HSET', KEYS[1], 'holder', '') end
return 1
"""


def boot_time_s() -> float:
    """A clock that also goes on while the machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Lease:
    one_machine = False
    leader_is_here = True
    """The replicas share the nodes that the leader adds."""

    def __init__(self, config: Cluster, holder: str, now: Callable[[], float] = boot_time_s) -> None:
        self._config = config
        self._holder = holder
        self._now = now
        self._keys = [f"{config.prefix}:{name}" for name in ("lease", "token", "scaling")]
        self._ends_s = -1e9
        """When this process has to stop leading, by its own clock."""
        self._free_s = -1e9
        """When the lease of another holder ends, if it does not renew it."""
        self.token = 0
        """The highest token known here; that of this process while it leads."""
        self.state = b""
        """The autoscaler's state when this process got the lease."""
        self._failed = False
        """Whether the state could not be stored last time."""
        self._task: asyncio.Task[None] | None = None
        self._client: Client | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())

    def is_leader(self) -> bool:
        return self._now() < self._ends_s

    async def commit(self, state: bytes) -> bool:
        """Store the autoscaler's state. Return whether this process is the leader, and may act: the server has
        confirmed its token."""
        client, token = self._client, self.token
        if client is None or not self.is_leader() or len(state) > MAX_STATE_BYTES:
            return False
        try:
            confirmed = await client.eval(
                _COMMIT, 2, self._keys[0], self._keys[2], self._holder, str(token), state, STATE_TTL_S
            )
        except Exception as error:  # redis-py raises many
            if not self._failed:
                log.warning("scaling_state_not_stored", "The autoscaler does not act.", reason=describe_error(error))
            self._failed = True
            return False
        self._failed = False
        if not confirmed:
            self._ends_s = -1e9
        return bool(confirmed) and self.is_leader()

    async def close(self) -> None:
        """Let another replica lead at once."""
        if self._task is None:
            return
        await end_tasks([self._task])
        if self.is_leader():
            self._ends_s = -1e9
            with suppress(Exception):
                client = create_client(self._config)
                async with asyncio.timeout(1.0):
                    await client.eval(_RELEASE, 1, self._keys[0], self._holder)
                    await client.aclose()

    async def _run(self) -> None:
        while True:
            try:
                self._client = create_client(self._config)
                while True:
                    await self._take(self._client)
                    await asyncio.sleep(self._pause_s())
            except Exception:  # the link logs why the server does not reply
                pass
            finally:
                client, self._client = self._client, None
                if client is not None:
                    with suppress(Exception):
                        await client.aclose()
            await asyncio.sleep(self._config.lease_s / RENEWALS / 2.0)

    def _pause_s(self) -> float:
        pause_s = self._config.lease_s / RENEWALS
        until_free_s = self._free_s - self._now()
        return pause_s if until_free_s < 0.0 else min(pause_s, until_free_s + 0.01)

    async def _take(self, client: Client) -> None:
        """Take or renew the lease, if no other process has it."""
        lease_s = self._config.lease_s
        began_s = self._now()
        was_leader = began_s < self._ends_s
        may_take_missing = was_leader or began_s >= self._free_s
        taken, token, rest = await client.eval(
            _TAKE, 3, *self._keys, self._holder, int(1000.0 * EXPIRES * lease_s), self.token,
            "1" if may_take_missing else "0",
        )  # fmt: skip
        self.token = max(self.token, int(token or 0))
        if taken:
            if not was_leader:
                self.state = bytes(rest or b"")
            self._ends_s = began_s + HOLDS * lease_s
        else:
            self._ends_s = -1e9
            if int(rest) > 0:
                self._free_s = self._now() + int(rest) / 1000.0
