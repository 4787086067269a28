"""The webhook of alerts: what it sends, and receivers that are down, slow, broken or hostile."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from typing import Any

import pytest
from support.engine_scripts import HANG, Behaviour, failing, hanging, normal, script
from support.polling import until
from support.running_router import router
from support.scripted_engine import ScriptedEngine, engines

from warmroute.app import alert_webhook, process
from warmroute.app.alert_webhook import MAX_QUEUED, MAX_SENT, AlertWebhook, ChangedAlerts, create_webhook
from warmroute.app.startup import check_startup
from warmroute.config import Alerts, ConfigError, from_table, keys_needing_restart

PATH = "/hook/T0P-SECRET-PATH?token=also-secret"


@pytest.fixture(autouse=True)
def _quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alert_webhook, "PAUSES_S", (0.01, 0.02, 0.03))
    monkeypatch.setattr(alert_webhook, "BETWEEN_S", 0.01)
    monkeypatch.setattr(alert_webhook, "TIMEOUT_S", 0.5)
    monkeypatch.setattr(alert_webhook, "CLOSE_TIMEOUT_S", 0.2)


def alert(id: str = "node_down", severity: str = "critical", ended: int | None = None, **more: Any) -> dict[str, Any]:
    return {
        "id": id, "name": id.split()[0], "severity": severity, "since": 1000, "ended": ended, "title": "gpu-a is down",
        "cause": "Connection refused.", "what_to_do": "Restart it.", "nodes": ["gpu-a"], "count": 0, "source": "",
        "sources": [], **more,
    }  # fmt: skip


def webhook_to(receiver: ScriptedEngine | int, secret: str = "", **more: Any) -> AlertWebhook:
    port = receiver if isinstance(receiver, int) else receiver.port
    webhook = AlertWebhook(Alerts(webhook_url=f"http://127.0.0.1:{port}{PATH}", **more), secret)
    webhook.start()
    return webhook


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    lines = [record.getMessage() for record in caplog.records if "alert_webhook" in record.getMessage()]
    assert not any("SECRET" in line or "secret" in line for line in lines)
    return [line.split()[0] for line in lines]


def bodies(receiver: ScriptedEngine) -> list[dict[str, Any]]:
    return [json.loads(seen.body) for seen in receiver.seen]


async def test_an_alert_of_a_router_is_sent_when_it_begins_and_when_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "ALERTS_S", 0.1)
    monkeypatch.setattr(process, "FINE_S", 0.1)
    monkeypatch.setenv("HOOK_SECRET", "Bearer t0ken")
    async with engines(2) as [engine, receiver]:
        alerts = {"webhook_url": f"http://127.0.0.1:{receiver.port}{PATH}", "webhook_secret_env": "HOOK_SECRET"}
        async with router(engine, alerts=alerts) as r:
            name = r.node(0).name
            assert (await r.admin("POST", f"/admin/nodes/{name}/drain")).status == 200
            await until(lambda: len(receiver.seen) == 1)
            assert (await r.admin("POST", f"/admin/nodes/{name}/undrain")).status == 200
            await until(lambda: len(receiver.seen) == 2)
            listed = json.loads((await r.admin("GET", "/admin/alerts")).body)["alerts"]
            page = (await r.admin("GET", "/metrics")).body.decode()
        began, _ = receiver.seen
        assert began.line == f"POST {PATH} HTTP/1.1".encode()
        assert began.get(b"authorization") == [b"Bearer t0ken"] and began.get(b"content-type") == [b"application/json"]
        first, second = bodies(receiver)
        assert [one["id"] for one in first["alerts"]] == ["no_node"] and first["alerts"][0]["ended"] is None
        assert second["alerts"] == listed and second["alerts"][0]["ended"] >= first["alerts"][0]["since"]
        assert first["text"].startswith("[critical] No node can serve requests. All nodes are down")
        assert second["text"] == "[ended] No node can serve requests" and first["router"] and first["sent"]
        assert 'warmroute_alert_webhook_changes_total{outcome="sent"} 2' in page


async def test_without_a_url_nothing_is_sent_and_no_thread_runs() -> None:
    assert create_webhook(Alerts()) is None
    async with engines() as [engine], router(engine) as r:
        assert r.service.alert_webhook is None
        page = (await r.admin("GET", "/metrics")).body.decode()
        assert "warmroute_alert_webhook_changes_total{" not in page


@pytest.mark.parametrize("first", [failing(503), failing(429), script(b"\x00\xff nonsense\r\n\r\n"), script("reset")])
async def test_a_failure_is_tried_again(first: Behaviour, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with engines() as [receiver]:
        receiver.behave = first
        webhook = webhook_to(receiver)
        webhook.send([alert()])
        await until(lambda: receiver.accepted >= 1)
        receiver.behave = normal()
        await until(lambda: webhook.counts["sent"] == 1)
        await webhook.close()
        assert not logged(caplog) and not webhook.counts["failed"]


async def test_a_receiver_that_stays_broken_is_tried_four_times_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    async with engines() as [receiver]:
        receiver.behave = failing(500)
        webhook = webhook_to(receiver, "shh-secret")
        for number in range(3):
            webhook.send([alert()])
            await until(lambda number=number: webhook.counts["failed"] == number + 1)
            assert len(receiver.seen) == 4 * (number + 1)
        assert logged(caplog) == ["alert_webhook_failed"]
        receiver.behave = normal()
        webhook.send([alert(ended=2000)])
        await until(lambda: webhook.counts["sent"] == 1)
        await until(lambda: len(logged(caplog)) == 2)
        assert logged(caplog)[1] == "alert_webhook_recovered"
        await webhook.close()


@pytest.mark.parametrize("status", [301, 302, 307, 400, 401, 404])
async def test_a_refusal_is_not_tried_again_and_no_redirect_is_followed(status: int) -> None:
    async with engines(2) as [receiver, elsewhere]:
        receiver.behave = failing(status, b"Location: http://127.0.0.1:%d/\r\n" % elsewhere.port)
        webhook = webhook_to(receiver)
        webhook.send([alert()])
        await until(lambda: webhook.counts["failed"] == 1)
        await webhook.close()
        assert len(receiver.seen) == 1 and not elsewhere.seen


@pytest.mark.parametrize(
    "behaviour",
    [
        hanging,
        script(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc", HANG),
        script(b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n" + b"x" * 1_000_000),
        script(b"HTTP/1.1 200 OK\r\n" + b"A: " + b"x" * 1_000_000),
        script(*[b"HTTP/1.1 102 Processing\r\n\r\n"] * 1000, HANG),
    ],
    ids=["hangs", "stops", "too large", "endless head", "only 1xx"],
)
async def test_a_hostile_receiver_costs_only_its_alerts(behaviour: Behaviour) -> None:
    async with engines() as [receiver]:
        receiver.behave = behaviour
        webhook = webhook_to(receiver)
        webhook.send([alert()])
        await until(lambda: webhook.counts["failed"] == 1)
        receiver.behave = normal()
        webhook.send([alert()])
        await until(lambda: webhook.counts["sent"] == 1)
        await webhook.close()


async def test_nobody_listens(caplog: pytest.LogCaptureFixture) -> None:
    async with engines() as [receiver]:
        port = receiver.port
    webhook = webhook_to(port)
    webhook.send([alert()])
    await until(lambda: webhook.counts["failed"] == 1)
    assert logged(caplog) == ["alert_webhook_failed"]
    await webhook.close()


async def test_what_waits_for_a_slow_receiver_is_bounded_and_costs_the_caller_no_time() -> None:
    async with engines() as [receiver]:
        release = asyncio.Event()
        receiver.behave = script(release, b"HTTP/1.1 204 No Content\r\n\r\n")
        webhook = webhook_to(receiver)
        webhook.send([alert("first")])
        await until(lambda: receiver.seen)
        began_s = time.process_time()
        for number in range(10_000):
            webhook.send([alert(f"a {number}")])
        assert time.process_time() - began_s < 2.0
        assert webhook.counts["dropped"] == 10_000 - MAX_QUEUED
        release.set()
        await until(lambda: webhook.counts["sent"] == 1 + MAX_QUEUED)
        got = [one["id"] for body in bodies(receiver)[-MAX_QUEUED // MAX_SENT :] for one in body["alerts"]]
        assert got == [f"a {number}" for number in range(10_000 - MAX_QUEUED, 10_000)], "the latest"
        await webhook.close()


async def test_the_end_of_the_router_does_not_wait_for_a_receiver_that_hangs() -> None:
    async with engines() as [receiver]:
        receiver.behave = hanging
        webhook = webhook_to(receiver)
        webhook.send([alert()])
        await until(lambda: receiver.seen)
        began_s = time.monotonic()
        await webhook.close()
        assert time.monotonic() - began_s < 5.0


async def test_only_severe_alerts_are_sent() -> None:
    async with engines() as [receiver]:
        webhook = webhook_to(receiver, webhook_severity="critical")
        webhook.send([alert("a", "info"), alert("b", "warning"), alert("c", "critical")])
        await until(lambda: webhook.counts["sent"] == 1)
        await webhook.close()
        assert [one["id"] for body in bodies(receiver) for one in body["alerts"]] == ["c"]


async def test_a_long_alert_is_sent_whole_and_its_text_is_bounded() -> None:
    async with engines() as [receiver]:
        webhook = webhook_to(receiver)
        webhook.send([alert(title="x" * 10_000, cause='"\n\u2028\ud83d'.encode("utf-8", "replace").decode())])
        await until(lambda: webhook.counts["sent"] == 1)
        await webhook.close()
        [body] = bodies(receiver)
        assert len(body["text"]) <= alert_webhook.MAX_TEXT and len(body["alerts"][0]["title"]) == 10_000


# Several workers.


def test_changes_are_found_between_two_lists() -> None:
    changes = ChangedAlerts()
    a, b = alert("a"), alert("b")
    assert changes.update([a, b], True, 1.0) == [a, b]
    assert changes.update([a, b], True, 2.0) == []
    assert changes.update([a], False, 3.0) == [], "a worker that did not answer may know of b"
    assert changes.update([a | {"ended": 4}], True, 5.0) == [a | {"ended": 4}, b | {"ended": 5}]
    assert changes.update([a | {"ended": 4}], True, 6.0) == []
    assert changes.update([a], True, 7.0) == [a], "it begins again"


# Configuration.


@pytest.mark.parametrize(
    "url",
    [
        "ftp://h/x", "file:///etc/passwd", "//h/x", "http://", "https:///x", "http://h:0/", "http://h:99999/", "x",
        "http://h/a b", "http://h/\r\nX: y", "http://user:pass@h/", "http://[::1", "http://h/é",
        "http://h/" + "x" * 3000,
        "unix:///run/x", "javascript:alert(1)",
    ],
)  # fmt: skip
def test_only_http_urls_are_allowed(url: str) -> None:
    with pytest.raises(ConfigError) as error:
        from_table({"alerts": {"webhook_url": url}})
    assert "alerts.webhook_url" in str(error.value) and url not in str(error.value), "it may contain a secret"


@pytest.mark.parametrize("header", ["Host", "content-length", "Transfer-Encoding", "X Y", "X:", "", "X\r\nY", "x" * 65])
def test_the_header_of_the_secret_is_one_header(header: str) -> None:
    with pytest.raises(ConfigError):
        from_table({"alerts": {"webhook_url": "https://h/x", "webhook_header": header}})


def test_a_secret_needs_a_variable_that_is_set_and_a_url(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"needs alerts\.webhook_url"):
        from_table({"alerts": {"webhook_secret_env": "HOOK"}})
    config = from_table({"alerts": {"webhook_url": "https://h/x", "webhook_secret_env": "HOOK"}})
    assert "HOOK" in check_startup(config).problems[0]
    for value in ("a\r\nX: y", "a\nb", "é"):
        monkeypatch.setenv("HOOK", value)
        assert "control characters" in check_startup(config).problems[0]
        webhook = create_webhook(config.alerts)
        assert webhook is not None and webhook._headers == ()
    monkeypatch.setenv("HOOK", "Bearer x")
    assert not check_startup(config).problems
    assert keys_needing_restart(config, from_table({})) == ["alerts.webhook_url", "alerts.webhook_secret_env"]
