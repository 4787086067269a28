"""Clients that the router rejects: they are seen with their address, and wrong keys are answered later."""

from __future__ import annotations

import asyncio
import json
import time
from ipaddress import ip_network
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.polling import until
from support.raw_client import RawConnection, get, post
from support.running_router import RunningRouter, router
from support.scripted_engine import engines

from warmroute.config import ConfigError, from_table
from warmroute.edge.arrival import hash_key
from warmroute.edge.client_address import MAX_HOPS, ClientAddresses
from warmroute.edge.client_connection import MAX_HELD

KEYS = [{"sha256": hash_key("good"), "tenant": "a"}]
GOOD = ["Authorization: Bearer good"]
WRONG = ["Authorization: Bearer wrong-key-of-a-user"]
WRONG_HASH = hash_key("wrong-key-of-a-user")[:8]
DELAY_S = 0.45
"""The timer wheel's ticks begin before the delay does."""


async def alerts(r: RunningRouter) -> dict[str, dict[str, Any]]:
    r.service.alerts.update(time.monotonic())
    found = json.loads((await r.admin("GET", "/admin/alerts")).body)["alerts"]
    return {alert["id"]: alert for alert in found}


async def storm(r: RunningRouter, request: bytes, count: int, clients: int = 20) -> None:
    """Send the same request again and again, on some connections."""

    async def client(requests: int) -> None:
        peer = await r.connect()
        for _ in range(requests):
            peer.write(request)
            response = await peer.response()
            if response.get("connection") == "close":
                peer.close()
                peer = await r.connect()
        peer.close()

    await asyncio.gather(*(client(count // clients) for _ in range(clients)))


# What an operator sees.


async def test_a_storm_of_wrong_keys_is_in_the_log_the_alerts_and_the_live_feed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    async with engines() as [engine], router(engine, keys=KEYS) as r:
        r.service.listener.wrong_key_delay_s = 0.0
        await storm(r, post(headers=WRONG), 2000)
        alert = (await alerts(r))["client_errors 401 invalid_api_key"]
        assert alert["name"] == "client_errors" and alert["ended"] is None
        assert alert["count"] == 2000 and alert["source"] == "127.0.0.1"
        assert alert["title"] == "2,000 requests were rejected with 401 (invalid_api_key)"
        assert f"hash of their key begins with {WRONG_HASH}" in alert["cause"]
        lines = [record.getMessage() for record in caplog.records if "client_errors" in record.getMessage()]
        assert lines and len(lines) <= 2
        assert f" source=127.0.0.1 source_count=2000 key_sha256={WRONG_HASH} key_count=2000: " in lines[0]
        assert "wrong-key" not in caplog.text and "wrong-key" not in json.dumps(alert)
        assert hash_key("wrong-key-of-a-user") not in caplog.text
        snapshot = r.service.live_feed._snapshot
        rows = snapshot.sections(snapshot.read_on_loop())["client_errors"]
        assert isinstance(rows, list)
        [row] = rows
        assert row == {
            "status": 401, "code": "invalid_api_key", "total": 2000, "recent": 2000,
            "sources": [{"source": "127.0.0.1", "count": 2000}], "keys": [{"key_sha256": WRONG_HASH, "count": 2000}],
        }  # fmt: skip


async def test_wrong_admin_tokens_are_in_the_log_and_the_alerts(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    token = "the-operators-token"
    async with engines(1) as (engine,), router(engine, admin={"token_sha256": hash_key(token)}) as r:
        for _ in range(120):
            assert (await r.admin("GET", "/admin/nodes", b"", "Authorization: Bearer guessed")).status == 401
        r.service.alerts.update(time.monotonic())
        listed = await r.admin("GET", "/admin/alerts", b"", f"Authorization: Bearer {token}")
    [alert] = [one for one in json.loads(listed.body)["alerts"] if "invalid_token" in one["id"]]
    assert alert["count"] == 120 and alert["sources"][0]["source"] == "127.0.0.1"
    [line] = [record for record in caplog.records if "invalid_token" in record.getMessage()]
    assert line.levelname == "WARNING" and hash_key("guessed")[:8] in alert["cause"]
    assert token not in caplog.text and "guessed" not in caplog.text


@pytest.mark.parametrize(
    ("request_bytes", "id"),
    [
        (post(path="/v2/chat"), "client_errors 404 not_found"),
        (post(b'{"model":"gpt-none","messages":[]}'), "client_errors 404 model_not_found"),
        (post(b"x" * 2000), "client_errors 413 request_too_large"),
        (post(headers=["Content-Encoding: gzip"]), "client_errors 415 unsupported_content_encoding"),
        (b"GET nonsense\r\n\r\n", "client_errors 400 bad_request"),
    ],
    ids=["404", "model", "413", "415", "400"],
)
async def test_other_errors_of_clients_are_alerts_too(
    request_bytes: bytes, id: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with engines() as [engine], router(engine, limits={"body_bytes": 1000}) as r:
        await storm(r, request_bytes, 120)
        alert = (await alerts(r))[id]
        assert alert["count"] == 120 and alert["source"] == "127.0.0.1" and alert["what_to_do"]
        assert f" reason={id.split()[2]} count=" in caplog.text


async def test_a_few_errors_are_a_line_in_the_log_and_no_alert(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    async with engines() as [engine], router(engine, keys=KEYS) as r:
        assert (await r.request(post(headers=WRONG))).status == 401
        assert (await r.request(post())).status == 401
        assert await alerts(r) == {}
        assert (
            "client_errors status=401 reason=invalid_api_key count=2 source=127.0.0.1 source_count=2 key" in caplog.text
        )


async def test_the_request_log_names_the_source(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    async with engines() as [engine], router(engine, keys=KEYS, log={"requests": True}) as r:
        assert (await r.request(post(headers=WRONG))).status == 401
        assert f"status=401 reason=invalid_api_key source=127.0.0.1 key_sha256={WRONG_HASH}" in caplog.text


# X-Forwarded-For.


async def test_the_source_is_what_a_trusted_proxy_says_and_nobody_else() -> None:
    forged = ["X-Forwarded-For: 9.9.9.9"]
    async with engines() as [engine], router(engine) as r:
        await storm(r, post(path="/v2", headers=forged), 100)
        assert (await alerts(r))["client_errors 404 not_found"]["source"] == "127.0.0.1"
    listen = {"trusted_proxies": ["127.0.0.0/8", "10.0.0.0/8"]}
    async with engines() as [engine], router(engine, listen=listen) as r:
        chain = ["X-Forwarded-For: 9.9.9.9, 203.0.113.7", "X-Forwarded-For: 10.1.2.3"]
        await storm(r, post(path="/v2", headers=chain), 100)
        assert (await alerts(r))["client_errors 404 not_found"]["source"] == "203.0.113.7"


@pytest.mark.parametrize(
    ("peer", "forwarded", "source"),
    [
        (b"192.0.2.1", b"9.9.9.9", "192.0.2.1"),
        (b"10.0.0.1", b"", "10.0.0.1"),
        (b"10.0.0.1", b"203.0.113.7", "203.0.113.7"),
        (b"10.0.0.1", b"9.9.9.9, 203.0.113.7 , 10.0.0.2,10.0.0.3", "203.0.113.7"),
        (b"10.0.0.1", b"10.0.0.9, 10.0.0.2", "10.0.0.9"),
        (b"10.0.0.1", b"203.0.113.7:5123", "203.0.113.7"),
        (b"10.0.0.1", b"[2001:db8:1:2::7]:443", "2001:db8:1:2::/64"),
        (b"10.0.0.1", b"2001:db8:1:2::7", "2001:db8:1:2::/64"),
        (b"10.0.0.1", b"::ffff:203.0.113.7", "203.0.113.7"),
        (b"::ffff:10.0.0.1", b"203.0.113.7", "203.0.113.7"),
        (b"::1", b"203.0.113.7", "::1"),
        (b"fe80::1%eth0", b"", "fe80::1"),
        (b"10.0.0.1", b"203.0.113.7, unknown", "10.0.0.1"),
        (b"10.0.0.1", b"203.0.113.7,, 10.0.0.2", "10.0.0.2"),
        (b"10.0.0.1", b"fe80::1%<script>", "fe80::1"),
        (b"10.0.0.1", b"0x7f.1", "10.0.0.1"),
        (b"10.0.0.1", b"\xff\xfe, 999.1.1.1", "10.0.0.1"),
        (b"10.0.0.1", b"9" * 30_000, "10.0.0.1"),
        (b"10.0.0.1", b"203.0.113.7," + b"10.0.0.2," * 10_000 + b"10.0.0.3", "10.0.0.2"),
        (b"", b"203.0.113.7", "unix socket"),
    ],
)
def test_only_what_trusted_proxies_wrote_is_believed(peer: bytes, forwarded: bytes, source: str) -> None:
    assert ClientAddresses(["10.0.0.0/8"]).source(peer, forwarded) == source
    assert ClientAddresses(["10.0.0.0/8"]).source(peer, b"") == ClientAddresses([]).source(peer, forwarded)


@given(
    st.one_of(st.binary(max_size=60), st.just(b"10.0.0.1")),
    st.one_of(
        st.binary(max_size=200),
        st.lists(
            st.one_of(
                st.ip_addresses().map(lambda address: str(address).encode()),
                st.sampled_from(
                    [b"10.0.0.7", b"[::1]:9", b"", b" ", b"10.0.0.7:1:2", b"[", b"%", b"::ffff:10.0.0.7%1"]
                ),
            ),
            max_size=30,
        ).map(b", ".join),
    ),
)
def test_no_header_breaks_the_search_for_the_source(peer: bytes, forwarded: bytes) -> None:
    source = ClientAddresses(["10.0.0.0/8", "fe80::/10"]).source(peer, forwarded)
    assert source == "unix socket" or ip_network(source)


def test_the_unix_socket_can_be_a_trusted_proxy() -> None:
    assert ClientAddresses(["unix"]).source(b"", b"203.0.113.7") == "203.0.113.7"
    assert ClientAddresses(["unix"]).source(b"127.0.0.1", b"203.0.113.7") == "127.0.0.1"


def test_a_long_chain_is_read_from_the_right_and_not_to_its_end() -> None:
    started_s = time.thread_time()
    for _ in range(100):
        ClientAddresses(["10.0.0.0/8"]).source(b"10.0.0.1", b",".join([b"10.0.0.1"] * 3000))
    assert time.thread_time() - started_s < 0.5
    hops = [b"203.0.113.7", *[b"10.0.0.2"] * (MAX_HOPS - 1)]
    assert ClientAddresses(["10.0.0.0/8"]).source(b"10.0.0.1", b",".join(hops)) == "203.0.113.7"
    assert ClientAddresses(["10.0.0.0/8"]).source(b"10.0.0.1", b",".join([*hops, b"10.0.0.3"])) == "10.0.0.2"


@pytest.mark.parametrize("value", ["10.0.0.1/8", "proxy.example", "0.0.0.0/0", "::/0", "", "10.0.0.0/33"])
def test_a_trusted_proxy_that_is_none_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match=r"listen\.trusted_proxies"):
        from_table({"listen": {"trusted_proxies": [value]}})


async def test_a_reload_changes_the_trusted_proxies() -> None:
    async with engines() as [engine], router(engine) as r:
        changed = from_table({"listen": {"trusted_proxies": ["127.0.0.1"], "port": 0}, "admin": {"port": 0}})
        r.service.proxy.reconfigure(changed)
        await storm(r, post(path="/v2", headers=["X-Forwarded-For: 203.0.113.7"]), 100)
        assert (await alerts(r))["client_errors 404 not_found"]["source"] == "203.0.113.7"


# Wrong keys wait.


async def test_wrong_keys_are_answered_later_and_good_keys_at_once() -> None:
    async with engines() as [engine], router(engine, keys=KEYS) as r:
        began_s = time.monotonic()
        wrong = await r.connect()
        wrong.write(post(headers=WRONG))
        await until(lambda: r.service.listener.held == 1)
        for _ in range(5):
            assert (await r.request(post(headers=GOOD))).status == 200
        assert r.service.listener.held == 1, "good keys are served while a wrong one waits"
        response = await wrong.response()
        assert response.status == 401 and response.error["code"] == "invalid_api_key"
        assert time.monotonic() - began_s >= DELAY_S
        assert r.service.listener.held == 0
        wrong.write(post(headers=GOOD))
        assert (await wrong.response()).status == 200, "the connection goes on"


async def test_requests_behind_a_wrong_key_are_served_in_order() -> None:
    async with engines() as [engine], router(engine, keys=KEYS) as r:
        peer = await r.connect()
        peer.write(post(headers=WRONG) + post(headers=GOOD) + get("/v1/models", *WRONG) + post(headers=GOOD))
        assert [(await peer.response()).status for _ in range(4)] == [401, 200, 401, 200]


async def test_a_router_that_stops_cuts_off_clients_whose_wrong_key_still_waits() -> None:
    async with engines() as [engine], router(engine, keys=KEYS) as r:
        r.service.listener.wrong_key_delay_s = 60.0
        peer = await r.connect()
        peer.write(post(headers=WRONG))
        await until(lambda: r.service.listener.held == 1)
        r.service.listener.cut_off_all()
        assert await asyncio.wait_for(peer.rest(), 5.0) == b""
        await until(lambda: r.service.listener.held == 0)


async def test_a_wrong_key_with_an_unfinished_body_waits_too_and_its_body_is_not_read() -> None:
    async with engines() as [engine], router(engine, keys=KEYS) as r:
        peer = await r.connect()
        began_s = time.monotonic()
        peer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: r\r\nContent-Length: 30000000\r\n"
            + WRONG[0].encode()
            + b"\r\n\r\n"
        )
        await until(lambda: r.service.listener.held == 1)
        for _ in range(20):
            peer.write(b"x" * 1_000_000)
        await asyncio.sleep(0.1)
        assert r.service.listener.buffered_bytes == 0
        assert (await peer.response()).status == 401
        assert time.monotonic() - began_s >= DELAY_S
        assert await peer.rest() == b"", "the connection closes"


async def test_at_most_256_wrong_keys_wait_and_the_others_are_answered_at_once() -> None:
    async with engines() as [engine], router(engine, keys=KEYS) as r:
        r.service.listener.wrong_key_delay_s = 30.0
        peers = [await r.connect() for _ in range(MAX_HELD + 20)]
        for peer in peers:
            peer.write(post(headers=WRONG))
        answered: list[RawConnection] = []

        async def wait(peer: RawConnection) -> None:
            assert (await peer.response(patience_s=40.0)).status == 401
            answered.append(peer)

        tasks = [asyncio.create_task(wait(peer)) for peer in peers]
        await until(lambda: len(answered) == 20)
        assert r.service.listener.held == MAX_HELD
        assert (await r.request(post(headers=GOOD))).status == 200
        for task in tasks:
            task.cancel()
        for peer in peers[:100]:
            peer.disconnect()  # with a reset
        for peer in peers[100:]:
            peer.close()
        for client in list(r.service.listener.connections):
            client.timed_out()
        await until(lambda: r.service.listener.held == 0)
        assert r.service.counters.errors[401, "invalid_api_key"] == MAX_HELD + 20, "those who left count, too"


async def test_clients_that_leave_while_they_wait_leave_nothing_behind() -> None:
    async with engines() as [engine], router(engine, keys=KEYS) as r:
        for number in range(40):
            peer = await r.connect()
            peer.write(post(headers=WRONG) + b"GET /v1/mod" * (number % 3))
            await until(lambda: r.service.listener.held)
            if number % 2:
                peer.disconnect()
            else:
                peer.close()
        await until(lambda: not r.service.listener.connections and not r.service.listener.held)
        assert r.service.counters.errors[401, "invalid_api_key"] == 40
        assert r.service.listener.buffered_bytes == 0


async def test_a_waiting_401_ends_when_the_router_stops(caplog: pytest.LogCaptureFixture) -> None:
    async with engines() as [engine], router(engine, keys=KEYS, check_leaks=False) as r:
        r.service.listener.wrong_key_delay_s = 50.0
        peer = await r.connect()
        peer.write(post(headers=WRONG))
        await until(lambda: r.service.listener.held == 1)
        stopping = asyncio.create_task(r.service.stop())
        response = await peer.response(patience_s=2.0)
        assert response.status == 401 and response.get("connection") == "close"
        peer.close()
        async with asyncio.timeout(2.0):
            await stopping
        assert r.service.listener.held == 0
        assert "client_errors status=401 reason=invalid_api_key count=1 " in caplog.text, (
            "the last ones are logged, too"
        )


# The wrong protocol.


async def test_tls_on_a_plain_port_gets_an_answer_at_once_and_a_line_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    hello = bytes.fromhex("16030100c8010000c40303") + bytes(range(189))
    async with engines() as [engine], router(engine) as r:
        for request in (hello, hello + b"\r\n\r\n", hello[:1], hello[:5]):
            peer = await r.connect()
            peer.write(request)
            response = await peer.response(patience_s=2.0)
            assert response.status == 400 and response.error["code"] == "tls_on_plain_port"
            assert "http://" in response.error["message"]
            assert await peer.rest() == b""
        assert await alerts(r) == {}
        [line] = [record for record in caplog.records if "tls_on_plain_port" in record.getMessage()]
        assert line.levelname == "WARNING" and "count=4 source=127.0.0.1" in line.getMessage()
        assert "Clients speak TLS on the port where the router speaks plain HTTP." in line.getMessage()
