"""Shared by the tests of discovery: how they wait, and short intervals."""

from __future__ import annotations

import pytest

from warmroute.engines.discovery import dns_records, sync, targets_file


@pytest.fixture(autouse=True)
def _short_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets_file, "POLL_S", 0.02)
    monkeypatch.setattr(targets_file.TargetsFile, "max_retry_s", 0.05)
    monkeypatch.setattr(dns_records, "MIN_REFRESH_S", 0.05)
    monkeypatch.setattr(dns_records.DnsRecords, "max_retry_s", 0.05)
    monkeypatch.setattr(sync, "APPLY_S", 0.01)
    monkeypatch.setattr(sync, "CHECK_S", 0.05)
    monkeypatch.setattr(sync, "COMPARE_S", 0.05)
    monkeypatch.setattr(sync, "RETRY_S", 0.05)
