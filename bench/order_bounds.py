"""What the order of a queue could reach if it knew all requests in advance: mooncake_synthetic beyond the knee.

    python bench/order_bounds.py --data DIR

A simplified fleet: each of 8 nodes prefills one prompt after the other, and takes the first one of a common queue. A
prompt takes what the profile's formula says, with all that came before it cached; decoding takes a further share of the
time, as in the replay of `price`. There is no placement, so only the order differs. The orders:

    first come        the order of arrival
    least work        the shortest prompt first
    deadlines         the longest 10 % of the prompts are due T after their arrival, the others D; the earliest due time
                      first. This needs to know which prompts will be the longest. In some variants the longest 1 %,
                      which no p99 counts, are due later, or go last

`good` are the prompts whose first token comes within 2 s + 0.5 ms for each token, as in policy_comparison.py.
"""

from __future__ import annotations

import argparse
import heapq
from collections.abc import Callable
from math import inf
from pathlib import Path

from external_data import add_data_option, data_files
from policy_comparison import LOADS
from record import Report, add_record_option

from warmroute.lab.engine.timing import profile
from warmroute.lab.summary import percentile
from warmroute.lab.workloads import parse_workload, with_follow_ups

WORKLOAD = "mooncake_synthetic"
LIMIT = 800
NODES = 8
BLOCK = 16
DECODING = 1.16
"""Time that nodes are busy with prompts in the replay of `price`, divided by the time that the formula says."""
DEADLINES_S = ((3.0, 27.0), (5.0, 24.0), (7.0, 20.0), (9.0, 20.0))
"""D and T: from most prompts' sake to the longest ones'."""
LONGEST_S = ((3.0, 18.0, 50.0), (1.0, 18.0, 35.0))
"""D, T, and the deadline of the longest 1 %."""

Arrival = tuple[float, float, float]
"""When a prompt arrives, how long it takes to prefill, and within which time its first token is good, in seconds."""
Order = Callable[[float, float], float]
"""From a prompt's prefill time and arrival to its place: the smallest goes first."""


def arrivals(path: Path) -> list[Arrival]:
    timing, rate, cached = profile("2xh100-32b").timing, LOADS[WORKLOAD][2], set[int]()
    found: list[Arrival] = []
    for at_ms, prompt in with_follow_ups(parse_workload([str(path)]).arrivals(1, rate, 1, LIMIT)):
        if len(found) == LIMIT:
            break
        blocks = prompt.blocks.content(BLOCK).hashes(0, (prompt.prompt_tokens + prompt.output_tokens) // BLOCK)
        hit = 0
        while hit < (prompt.prompt_tokens - 1) // BLOCK and blocks[hit] in cached:
            hit += 1
        cached.update(blocks)
        new = prompt.prompt_tokens - hit * BLOCK
        work_ms = timing.b * new + timing.attention_ms(new, hit * BLOCK)
        found.append((at_ms / 1000.0, DECODING * work_ms / 1000.0, 2.0 + 0.0005 * prompt.prompt_tokens))
    return found


def first_token_times(requests: list[Arrival], order: Order) -> list[tuple[float, float, bool]]:
    """Return the prefill time of each prompt, its time to first token, and whether this is good."""
    free, queue, done = [0.0] * NODES, list[tuple[float, Arrival]](), list[tuple[float, float, bool]]()
    coming = iter(requests)
    upcoming = next(coming, None)
    while upcoming is not None or queue:
        now_s = heapq.heappop(free)
        if not queue and upcoming is not None:
            now_s = max(now_s, upcoming[0])
        while upcoming is not None and upcoming[0] <= now_s:
            heapq.heappush(queue, (order(upcoming[1], upcoming[0]), upcoming))
            upcoming = next(coming, None)
        at_s, work_s, good_s = heapq.heappop(queue)[1]
        ttft_s = now_s + work_s - at_s
        done.append((work_s, ttft_s, ttft_s <= good_s))
        heapq.heappush(free, now_s + work_s)
    return done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_data_option(parser, f"traces/{WORKLOAD}.jsonl.gz")
    add_record_option(parser)
    args = parser.parse_args()
    requests = arrivals(data_files(args.data, f"traces/{WORKLOAD}.jsonl.gz")[0])
    longest = sorted((work_s for _, work_s, _ in requests), reverse=True)
    tenth_s, hundredth_s = longest[LIMIT // 10 - 1], longest[LIMIT // 100 - 1]

    def deadlines(short_s: float, long_s: float, longest_s: float | None = None) -> Order:
        """`longest_s`: of the longest 1 %; None: that of the longest 10 %."""
        last_s = long_s if longest_s is None else longest_s
        return lambda work_s, at_s: (
            at_s + (last_s if work_s >= hundredth_s else long_s if work_s >= tenth_s else short_s)
        )

    orders: dict[str, Order] = {
        "first come": lambda _, at_s: at_s,
        "least work": lambda work_s, _: work_s,
        "deadlines 3 s and 27 s, the longest 1 % last": deadlines(3.0, 27.0, inf),
        **{f"deadlines {d:g}, {t:g} and {last:g} s": deadlines(d, t, last) for d, t, last in LONGEST_S},
        **{f"deadlines {d:g} s and {t:g} s": deadlines(d, t) for d, t in DEADLINES_S},
    }
    report = Report()
    report.value("work_share_of_the_longest_10_percent", f"{sum(longest[: LIMIT // 10]) / sum(longest):.0%}")
    report.table("orders", "order", "TTFT p50, s", "p90", "p99", "mean", "longest 10 %, p99", "good")
    for name, order in orders.items():
        done = first_token_times(requests, order)
        all_s = sorted(ttft_s for _, ttft_s, _ in done)
        long_s = sorted(ttft_s for work_s, ttft_s, _ in done if work_s >= tenth_s)
        shown = [*(percentile(all_s, at) for at in (0.5, 0.9, 0.99)), sum(all_s) / LIMIT, percentile(long_s, 0.99)]
        report.row(name, *(f"{value:.1f}" for value in shown), f"{sum(good for *_, good in done) / LIMIT:.0%}")
    report.record(args.record)


if __name__ == "__main__":
    main()
