"""Clients' errors: bounded memory whatever the sources, one line a minute, an alert with source and count."""

from __future__ import annotations

import random
from collections import Counter
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmroute.app.alerts import ActiveAlerts, client_error_alerts
from warmroute.edge.client_errors import MANY, TRACKED, WINDOW_S, ClientErrors, HeavyHitters


@given(st.lists(st.sampled_from("aaaaaaaabbbbccddefghijklmnopqrstuvwxyz"), max_size=400), st.integers(1, 8))
def test_heavy_hitters_keep_every_frequent_key_and_never_claim_too_much(keys: list[str], capacity: int) -> None:
    found, true = HeavyHitters(capacity), Counter(keys)
    for key in keys:
        found.add(key)
    assert len(found) <= capacity
    at_least = found.at_least()
    for key, count in at_least.items():
        assert 0 < count <= true[key]
    for key, count in true.items():
        if count * capacity > len(keys):
            assert key in at_least
    if len(true) <= capacity:
        assert at_least == true


def test_a_source_is_found_among_a_million_others_in_fixed_memory() -> None:
    found, chance = HeavyHitters(TRACKED), random.Random(5)
    for number in range(200_000):
        found.add("10.0.0.5" if chance.random() < 0.1 else f"2001:db8::{number:x}")
    assert len(found) == TRACKED and len(found._heap) == TRACKED and len(found._errors) <= TRACKED
    [(source, count)] = found.at_least().most_common(1)
    assert source == "10.0.0.5" and 15_000 < count <= 20_500


def seen(errors: ClientErrors, count: int, source: str = "10.0.0.5", code: str = "invalid_api_key") -> None:
    status = {"invalid_api_key": 401, "not_found": 404}.get(code, 400)
    for _ in range(count):
        errors.count(status, code, source, "ab12cd34" if status == 401 else "")


def test_a_storm_is_one_alert_with_count_and_source_until_it_is_over() -> None:
    errors = ClientErrors()
    alerts = ActiveAlerts(partial(client_error_alerts, errors))
    seen(errors, MANY - 1)
    assert alerts.update(0.0) == []
    seen(errors, 66_879 - MANY + 1)
    seen(errors, 20, "10.0.0.6")
    [began] = alerts.update(2.0)
    assert (began.name, began.severity, began.count) == ("client_errors", "warning", 66_899)
    assert began.sources == (("10.0.0.5", 66_879), ("10.0.0.6", 20))
    assert began.title == "66,899 requests were rejected with 401 (invalid_api_key)"
    assert began.cause == (
        "100% of those of the last minutes came from 10.0.0.5. The SHA-256 hash of their key begins with ab12cd34."
    )
    assert "warmroute hash-key" in began.what_to_do
    for minute in range(5):  # it goes on: the count is that since its beginning
        now_s = 2.0 + minute * WINDOW_S
        seen(errors, 1000)
        alerts.update(now_s)
        [alert] = alerts.current
        assert alert.since_s == 2.0 and alert.count == 66_899 + 1000 * (minute + 1)
        assert alert.sources[0] == ("10.0.0.5", 66_879 + 1000 * (minute + 1))
    assert alerts.update(now_s + WINDOW_S - 1.0) == []
    [ended] = alerts.update(now_s + WINDOW_S)
    assert ended.ended_s and not alerts.current and ended.count == 71_899
    seen(errors, MANY)
    [again] = alerts.update(now_s + 4 * WINDOW_S)
    assert again.count == MANY, "a new storm counts from its own beginning"


def test_sources_without_a_leader_and_keys_that_differ_are_said_to_be_so() -> None:
    errors = ClientErrors()
    for number in range(1000):
        errors.count(401, "invalid_api_key", f"10.0.{number // 250}.{number % 250}", f"{number:08x}")
        errors.count(401, "invalid_api_key", "10.9.9.9" if number < 10 else f"10.8.{number // 250}.{number % 250}", "")
    [alert] = client_error_alerts(errors, 0.0)
    assert "They come from many addresses" in alert.cause
    [row] = errors.describe()
    assert row["recent"] == row["total"] == 2000 and len(row["sources"]) == 4 and len(row["keys"]) == 4


def test_the_log_has_at_most_one_line_a_minute_for_each_code(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    errors = ClientErrors()
    list(errors.storms(0.0))
    assert not caplog.records
    seen(errors, 1)
    seen(errors, 3, "10.0.0.7", "not_found")
    list(errors.storms(2.0))
    first, second = caplog.records
    assert first.levelname == "WARNING" and second.levelname == "INFO"
    assert first.getMessage().startswith(
        "client_errors status=401 reason=invalid_api_key count=1 source=10.0.0.5 source_count=1 key_sha256=ab12cd34 "
        "key_count=1: "
    )
    assert "status=404 reason=not_found count=3 source=10.0.0.7 source_count=3: " in second.getMessage()
    for at_s in range(2, 122, 2):
        seen(errors, 500, "10.0.0.8")
        list(errors.storms(float(at_s)))
    lines = [record.getMessage() for record in caplog.records[2:]]
    assert len(lines) == 1 and "count=15500 source=10.0.0.8" in lines[0]
    list(errors.storms(122.0))
    assert len(caplog.records) == 4 and "count=14500 " in caplog.records[3].getMessage()
    for at_s in range(124, 600, 2):
        list(errors.storms(float(at_s)))
    assert len(caplog.records) == 4


def test_a_flood_of_one_code_hides_no_other_code() -> None:
    errors = ClientErrors()
    for number in range(10_000):
        errors.count(404, "not_found", f"10.{number >> 8}.{number & 255}.1", "")
    seen(errors, MANY, "10.0.0.9", "invalid_api_key")
    found = {alert.id: alert for alert in client_error_alerts(errors, 0.0)}
    assert found["client_errors 401 invalid_api_key"].sources == (("10.0.0.9", MANY),)
    assert found["client_errors 404 not_found"].count == 10_000
