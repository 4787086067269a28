"""The prompt doctor: finds what prevents prompts of a route from sharing their KV cache.

It compares a bounded sample of recent prompts in a background thread. Text stays in this process's memory.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import msgspec

from warmroute.app.prompt_doctor.findings import Finding, PromptChange, describe_part, find, find_change
from warmroute.app.prompt_doctor.samples import (
    MAX_ROUTES,
    MaskedPrompt,
    PromptSample,
    PromptSamples,
    RouteKey,
    RouteSamples,
    read_parts,
)
from warmroute.event_log import EventLog, where_it_failed

# Compares the sampled prompts in a thread, every few seconds, with at most MAX_CPU_SHARE of a core.

log = EventLog("warmroute.prompt_doctor")

INTERVAL_S: Final = 5.0
MAX_CPU_SHARE: Final = 0.02
"""The doctor is advice: it must not cost what it could save."""
MAX_BYTES: Final = 32 << 20
"""Memory for samples. Beyond it, the routes with the oldest samples lose them."""
MAX_FINDINGS: Final = 3
"""Per route: those that cost the most."""
FORGET_S: Final = 600.0
"""A route without requests for this long has no findings."""


_NOT_COUNTED: Final = (
    "The router cannot compare these prompts, because it does not know how many of their tokens were cached: "
)
_LET_REPORT: Final = (
    "et clients request usage (stream_options.include_usage) and engines report cached tokens (vLLM: "
    "--enable-prompt-tokens-details)."
)
NO_LOOKUPS: Final = (
    f"{_NOT_COUNTED}the policy does not look up caches, and responses do not report it. Set routing.policy to price, "
    f"overlap or approximate; or l{_LET_REPORT}"
)
NOT_LOOKED_UP: Final = (
    f"{_NOT_COUNTED}they are shorter than 200 tokens or the router cannot read them, and responses do not "
    f"report it. L{_LET_REPORT}"
)


class RouteReport(NamedTuple):
    samples: int
    agrees_until: str
    """Where most prompts stop to agree with others, such as `message 1 (user)`."""
    common_share: float
    """Share of the prompts' text before that."""
    findings: tuple[Finding, ...]
    """The most expensive first."""
    change: PromptChange | None
    """How recent prompts differ from earlier ones."""


_UNCOUNTED: Final = RouteReport(0, "", 0.0, (), None)
"""Why a route has no findings if its cached tokens are not counted."""


class _Counted(NamedTuple):
    """Up to where the costs of a route's findings are counted."""

    requests: int
    at_s: float
    sample: int
    """Number of the last sample."""


class PromptComparison:
    def __init__(
        self,
        requests: Callable[[RouteKey], int],
        looks_up_caches: Callable[[str], bool],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`requests`: the number of complete requests of a route. `looks_up_caches`: whether the policy of the
        route with this name does."""
        self._requests = requests
        self._looks_up_caches = looks_up_caches
        self._now = now
        self.samples = PromptSamples()
        self.reports: dict[RouteKey, RouteReport] = {}
        """Replaced as a whole by each examination."""
        self._routes: dict[RouteKey, RouteSamples] = {}
        self._counted: dict[RouteKey, _Counted] = {}
        self._uncounted: dict[RouteKey, float] = {}
        """Routes of which no sample could be compared, and when the last one arrived: nobody counted cached tokens."""
        self._failed = False
        self._forgotten = 0
        """How often everything was forgotten."""

    def forget(self) -> None:
        """Drop all samples and reports."""
        self.samples.forget_all()
        self._forgotten += 1
        self._routes, self._counted, self._uncounted, self.reports = {}, {}, {}, {}

    # In the background.

    async def run(self) -> None:
        wait_s = INTERVAL_S
        while True:
            await asyncio.sleep(wait_s)
            started_s = time.monotonic()
            try:
                wait_s = max(INTERVAL_S, await self.examine() / MAX_CPU_SHARE)
            except Exception as error:
                if not self._failed:
                    self._failed = True
                    log.error("prompt_doctor_failed", "It tries again.", reason=where_it_failed(error))
                wait_s = max(INTERVAL_S, (time.monotonic() - started_s) / MAX_CPU_SHARE)

    async def examine(self) -> float:
        """Compare the samples of the routes that have new ones. Return the CPU time that this took."""
        new = self.samples.take(self._now())
        if not new and not self.reports:
            return 0.0
        counts = {key: self._requests(key) for key in {*self.reports, *[key for key, _sample in new]}}
        forgotten, now_s = self._forgotten, self._now()
        loop = asyncio.get_running_loop()
        reports, cpu_s = await loop.run_in_executor(None, self.compare, new, counts, now_s)
        if self._forgotten == forgotten:
            self.reports = reports
        else:  # while the thread worked
            self._routes, self._counted, self._uncounted = {}, {}, {}
        return cpu_s

    def compare(
        self, new: list[tuple[RouteKey, PromptSample]], counts: dict[RouteKey, int], now_s: float
    ) -> tuple[dict[RouteKey, RouteReport], float]:
        """Read new samples and compare those of their routes. Return the reports of all routes, and the CPU time."""
        started_s = time.thread_time()
        changed: set[RouteKey] = set()
        for key, sample in new:
            if not self._read(sample) or (key not in self._routes and len(self._routes) >= MAX_ROUTES):
                continue
            if sample.cached_tokens is None:
                self._uncounted[key] = sample.arrived_s
                continue
            self._uncounted.pop(key, None)
            self._routes.setdefault(key, RouteSamples()).add(sample)
            changed.add(key)
        self._limit_memory()
        reports: dict[RouteKey, RouteReport] = {}
        for key, route in list(self._routes.items()):
            if not route.recent or now_s - route.recent[-1].arrived_s > FORGET_S:
                self._routes.pop(key, None)
                self._counted.pop(key, None)
                continue
            before = self.reports.get(key)
            report = self._report(key, route) if key in changed or before is None else before
            reports[key] = self._with_costs(key, route, report, before, counts.get(key, 0), now_s)
        for key, arrived_s in list(self._uncounted.items()):
            if now_s - arrived_s > FORGET_S:
                self._uncounted.pop(key, None)
            else:
                reports.setdefault(key, _UNCOUNTED)
        return reports, time.thread_time() - started_s

    @staticmethod
    def _read(sample: PromptSample) -> bool:
        """Replace a sample's body by its text. Return False if it has no prompt."""
        body, sample.body = sample.body, b""
        try:
            parts = read_parts(sample.path, body)
        except Exception as error:  # whatever clients send
            log.debug("prompt_not_compared", reason=where_it_failed(error))
            return False
        if not sample.prompt_tokens:
            sample.cached_tokens = None
        if parts is None:
            return False
        sample.prompt = MaskedPrompt(parts)
        return True

    def _limit_memory(self) -> None:
        routes = self._routes
        sizes = {key: route.size_bytes for key, route in routes.items()}
        while sum(sizes.values()) > MAX_BYTES:
            key = max(sizes, key=lambda one: sizes[one])
            route = routes[key]
            for samples in (route.recent, route.older):
                for _ in range((len(samples) + 1) // 2):
                    samples.popleft()
            sizes[key] = route.size_bytes

    @staticmethod
    def _report(key: RouteKey, route: RouteSamples) -> RouteReport:
        samples = list(route.recent)
        prompts = [sample.prompt for sample in samples if sample.prompt is not None]
        findings, shared = find(key, samples)
        findings.sort(key=lambda finding: -finding.lost_ms)
        places: Counter[str] = Counter()
        common = total = 0
        for prompt, at in zip(prompts, shared, strict=True):
            part = prompt.position(at).part
            places[describe_part(part.kind, part.number, part.role)] += 1
            common += prompt.raw_characters(at)
            total += prompt.characters
        return RouteReport(
            len(samples), places.most_common(1)[0][0] if len(prompts) > 1 else "", common / max(1, total),
            tuple(findings[:MAX_FINDINGS]), find_change(samples, list(route.older)),
        )  # fmt: skip

    def _with_costs(
        self, key: RouteKey, route: RouteSamples, report: RouteReport, before: RouteReport | None, requests: int,
        now_s: float,
    ) -> RouteReport:  # fmt: skip
        """Add what the findings cost since the last examination.

        The new samples stand for the requests since then. Earlier samples count, too, if only now another prompt shows
        that they have the difference.
        """
        known = {finding.id: finding for finding in before.findings} if before is not None else {}
        last = self._counted.get(key) or _Counted(requests, now_s, route.last_number)
        new = sum([sample.weight for sample in route.recent if sample.number > last.sample])
        count, seconds = max(0, requests - last.requests), now_s - last.at_s
        if new or not count or key not in self._counted:
            self._counted[key] = _Counted(requests, now_s, route.last_number)
        findings: list[Finding] = []
        for finding in report.findings:
            past = known.get(finding.id)
            losses = finding.losses
            counted = past.counted if past is not None else frozenset()
            lost_ms = sum([lost for number, lost in losses.items() if number > last.sample])
            lost_ms *= count / new if new else 0.0
            lost_ms += sum([lost for number, lost in losses.items() if number <= last.sample and number not in counted])
            findings.append(
                msgspec.structs.replace(
                    finding,
                    counted=frozenset([number for number in counted if number >= route.recent[0].number]).union(losses),
                    since_s=past.since_s if past is not None else finding.since_s,
                    lost_gpu_s=(past.lost_gpu_s if past is not None else 0.0) + lost_ms / 1000.0,
                    gpus=finding.lost_ms * count / 1000.0 / seconds if seconds > 0 else 0.0,
                )
            )
        return report._replace(findings=tuple(findings))

    # For the page, the admin API and the alerts.

    @property
    def findings(self) -> list[Finding]:
        """Return the findings of all routes, the most expensive first."""
        found = [finding for report in self.reports.values() for finding in report.findings]
        return sorted(found, key=lambda finding: -finding.gpus)

    def describe(self, wall_s: float, show_text: bool = False) -> dict[str, Any]:
        """`wall_s`: the Unix time at which the router's clock was 0."""
        return {
            "routes": [
                {
                    "model": model,
                    "route": route,
                    "samples": report.samples,
                    "agrees_until": report.agrees_until,
                    "common_share": round(report.common_share, 3),
                    "unavailable": self._why_unavailable(route) if report is _UNCOUNTED else "",
                }
                for (model, route), report in sorted(self.reports.items())
            ],
            "findings": [finding.describe(wall_s, show_text) for finding in self.findings],
        }

    def _why_unavailable(self, route: str) -> str:
        return NOT_LOOKED_UP if self._looks_up_caches(route) else NO_LOOKUPS
