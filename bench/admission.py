"""Whose turn it is on a fleet that is full, in virtual time under production's admission: two tables.

    python bench/admission.py [--seeds 3] [--requests 3000]

Priorities: high, normal and low at one to two times what two L4 can do. The last columns count refusals of high and
normal requests at whose time a low one waited here, or was being served: there must be none.

Tenants: four of them, the first with ten times the requests; each of the others asks for more than a quarter of what
the fleet can do. Uncached tokens that each got while all of them waited; there must be none more than 10 % off.
"""

from __future__ import annotations

import argparse

from fairness import flood, priorities

RATES = (12.0, 16.0, 20.0, 24.0, 30.0)
MAX_WAITING = 200
TENANT_RATE = 6.0
TIMES = 10.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=3000)
    args = parser.parse_args()
    print(f"priority_mix, two L4, price, max_waiting = {MAX_WAITING}, {args.requests:,} requests, seed 1\n")
    print("| requests/s | high: served, TTFT p90 | normal | low | refused while a low one waits | is served |")
    print("| --- | --- | --- | --- | --- | --- |")
    for rate in RATES:
        mixed = priorities(rate=rate, requests=args.requests, max_waiting=MAX_WAITING)
        cells = [
            f"{mixed.served[name] / mixed.asked[name]:.1%}"
            + (f", {mixed.ttft_p90_ms[name] / 1000.0:.2f} s" if mixed.served[name] else "")
            for name in ("high", "normal", "low")
        ]
        print(
            f"| {rate:g} | {' | '.join(cells)} | {mixed.beside_waiting_low} | {mixed.beside_served_low} |", flush=True
        )
    print(f"\nfour tenants, two L4, price, {args.requests:,} requests; the first sends {TIMES:g} times as many\n")
    print("| seed | uncached tokens: the first | second | third | fourth | furthest from the mean |")
    print("| --- | --- | --- | --- | --- | --- |")
    for seed in range(1, args.seeds + 1):
        got = list(flood(rate=TENANT_RATE, times=TIMES, requests=args.requests, seed=seed).values())
        mean = sum(got) / len(got)
        off = max(abs(tokens - mean) for tokens in got) / mean
        print(f"| {seed} | {' | '.join(f'{tokens:,}' for tokens in got)} | {off:.1%} |", flush=True)


if __name__ == "__main__":
    main()
