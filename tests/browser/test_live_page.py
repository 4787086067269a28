"""The live page in a real browser, under load: Debian's Chromium, driven by Playwright, judged by axe-core.

WARMROUTE_SCREENSHOTS=1 writes the pictures of docs/guides/live-page.md.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from live_page_scenario import TOKEN, Scenario, scenario

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]
ROOT = Path(__file__).resolve().parents[2]
WARM_UP_S = 25.0


async def drive(running: Scenario) -> dict[str, Any]:
    """Run the browser and return what it found."""
    chromium, node = shutil.which("chromium"), shutil.which("node")
    assert chromium and node, "install Debian's packages chromium and nodejs"
    folder = str(ROOT / "docs" / "images") if os.environ.get("WARMROUTE_SCREENSHOTS") else ""
    process = await asyncio.create_subprocess_exec(
        node, "test/live_page.mjs", f"{running.admin_url}/", TOKEN, chromium, folder,
        cwd=ROOT / "ui", stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    stdout, stderr = await asyncio.wait_for(process.communicate(), 120)
    assert process.returncode == 0, stderr.decode()[-4000:]
    found: dict[str, Any] = json.loads(stdout)
    return found


def test_the_page_answers_an_operator_under_load() -> None:
    asyncio.run(_run())


async def _run() -> None:
    async with scenario() as running:
        load = asyncio.create_task(running.send_load())
        try:
            await asyncio.sleep(WARM_UP_S / 2)
            await running.fail_some_requests()
            await running.fail("us-2", mode="die")
            await running.send_wrong_keys(400)
            running.config.write_text(running.config.read_text() + '\n[routing]\npolicy = "pric"\n')
            await asyncio.sleep(WARM_UP_S / 2)
            found = await drive(running)
        finally:
            load.cancel()
        assert running.completed > 50
        check(found, running)


def check(found: dict[str, Any], running: Scenario) -> None:
    assert found["errors"] == []
    assert {url.split("/")[2] for url in found["requests"]} == {running.admin_url.split("/")[2]}, "requests elsewhere"

    # The token is in no address and in no lasting store.
    assert found["wrong_token"] == "The router rejected this token."
    assert found["address"] == f"{running.admin_url}/"
    assert not any("sesame" in url for url in found["requests"])
    assert "sesame" not in found["stored"] and found["token_after_sign_out"] == 0

    # Does the router help, how much, which node is in trouble, what should be changed?
    assert found["verdict"].startswith("Yes. ") and "so routing adds" in found["verdict"]
    assert len(found["tiles"]) == 7 and found["charts"] == 6 and found["connection"] == "live"
    assert any("us-2 is down" in title for title in found["alerts"])
    assert found["in_trouble"] == ["us-2"]
    assert sorted(found["nodes"]) == ["eu-1", "eu-2", "eu-3", "eu-4", "us-1", "us-2"]
    assert found["islands"] == ["eu-west", "us-east"]
    assert "interpreted" in found["facts"] and "policy price" in found["facts"]
    assert len(found["routes"]) == 4 and found["prefixes"] >= 2
    assert "requests_per_min" in found["queue"]
    assert any("route nightly: a date or time at message 0 (system), character 6" in text for text in found["findings"])
    # Clients that do not stream have no time to the first token, but a total time, and a token took at most its share.
    [unstreamed] = [row for row in found["routes"] if "reports" in row]
    assert "≤ " in unstreamed and " / " in unstreamed and unstreamed.count("–") == 1, unstreamed
    assert {row.split("|")[0] for row in found["tenants"]} == {"batch", "chat", "reports", "search"}
    assert any(row.startswith("invalid_api_key|401|400|400|127.0.0.1 (400)") for row in found["client_errors"])
    assert any("400 requests were rejected with 401" in title for title in found["alerts"])
    assert "failed" in found["configuration"] and "unknown value 'pric'" in found["configuration"]
    assert any("The last reload of the configuration failed" in title for title in found["alerts"])

    # Failed requests: why each node failed; the search.
    assert found["failures"] and all("HTTP status 500" in one or "us-2" in one for one in found["failures"])
    assert any("500" in row and "InternalServerError" in row and "other" in row for row in found["tries"]), found[
        "tries"
    ]
    assert found["found_by_id"] == [found["searched_id"]]
    assert found["found_by_status"] and all("502" in one for one in found["found_by_status"])
    assert found["found_ok"] and all("502" not in one and "chat" in one for one in found["found_ok"])
    assert found["found_nothing"] == "0 requests found." and found["after_clear"] == len(found["failures"])

    # Charts: missing time is a gap, a lonely measurement a dot, and no label is cut.
    assert 0.2 < found["gap_share"] < 0.32 and found["dots"] == 3
    assert found["cut_labels"] == []
    assert any("could be. Lost since" in text for text in found["findings"])
    assert found["advice"].startswith("What to change: qwen3-8b, route nightly: a date or time"), found["advice"]
    assert found["cut"] == [], "a table is wider than its card"
    assert not any("Time" in text or "2026" in text for text in found["findings"]), "text is hidden"

    # Decisions, filters, drains.
    assert len(found["prices"]) >= 2 and any("chosen" in price for price in found["prices"])
    assert "ms" in found["price_labels"] and found["stays"]
    assert sorted(found["filtered"]) == ["us-1", "us-2"] and found["first_node"] == "us-2", "trouble comes first"
    assert "It gets no new requests" in found["drain_question"] and found["state_after_escape"] == "up"

    # For everybody.
    assert all(not violations for violations in found["axe"].values()), found["axe"]
    assert found["dark"] != found["toggled"]
    assert found["phone_width"] <= 390 and found["phone_cut"] == []
    assert found["phone_menu_closed"] == [False, "false"] and found["phone_menu_open"] == [True, "true"]
    assert 0 <= found["phone_section_top"] < 120 and found["phone_menu_after"] == [False, "false"]
    assert found["phone_menu_stays"], "the button is gone after scrolling"
