"""CPU time per request and per chunk, compared with vllm-router, sglang-router and haproxy in the same run.

    python bench/peers.py --harness DIR [--rounds 3] [--seconds 2] [--policy prefix_hash] [--peers vr-rr,sgl-rr,haproxy]
    python bench/peers.py --harness DIR --tokenizer DIR [--rounds 3] [--seconds 2]

DIR must contain bench.py, the harness that runs the routers, a C load generator and a C mock engine. Its `setup` builds
them into PEERBENCH_HOME (~/peerbench). Each round runs every router once on the same core. The first table has the
medians over the rounds, and ours as a fraction of vllm-router's in the same round; the second has every round.

With --tokenizer, the policy is `price`, and each round runs vllm-router at round robin, Warmroute with this tokenizer
on conversations that it knows (64 of them; the last message of each request is new), with this tokenizer on distinct
prompts (the first message of each request is new, too), and Warmroute with text matching on the first kind.

The mock engines report no cache size, and 64 conversations of 128 KB have 2 million tokens. Wherever conversations are
known, the router therefore takes each node to cache 8 million tokens ([index] assumed_cache_tokens). With its default
of 131,072, no conversation would still be cached when its next turn comes. Distinct prompts have the default.

Releases are compiled: run `make compile` first, and set PYTHONPATH=build/compiled.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

from record import Report, add_record_option, load_average

from warmroute import build

os.environ["WARMROUTE_EXPERIMENT"] = "1"  # the routers' files set what is no key


class Scenario(NamedTuple):
    title: str
    field: str
    """Of the harness's row."""
    key: str
    """Suffix of the recorded values."""


SCENARIOS = {
    "A1": Scenario("1 KB request, µs of CPU", "cpu_us_req", "1kb"),
    "A16": Scenario("16 KB request, µs of CPU", "cpu_us_req", "16kb"),
    "A128": Scenario("128 KB request, µs of CPU", "cpu_us_req", "128kb"),
    "S10": Scenario("streamed chunk at 10 ms pace, µs of CPU", "cpu_us_ev", "chunk"),
    "L1": Scenario("one connection, p50 latency, µs", "lat_p50", "latency"),
    "IDLE": Scenario("memory at the start, MB", "rss_idle", "memory_start"),
    "MEM": Scenario("memory after 10,000 distinct 16 KB prompts, MB", "rss_after", "memory"),
}
"""The harness reports the last two in one row, MEM."""
PEERS = {
    "vr-rr": "vllm-router, round_robin",
    "vr-ca": "vllm-router, cache_aware",
    "sgl-rr": "sglang-router, round_robin",
    "sgl-ca": "sglang-router, cache_aware",
    "haproxy": "haproxy, roundrobin",
}


KNOWN, DISTINCT = "64", "0"
"""How many conversations the load generator has; 0: one for each request."""
HOLDS_ALL = "[index]\nassumed_cache_tokens = 8_000_000\n"


def start_line(policy: str, config: Path | None = None) -> str:
    warmroute = f"{sys.executable} -c 'import sys; from warmroute.app.main import main; sys.exit(main())'"
    nodes = "--node http://127.0.0.1:18001 --node http://127.0.0.1:18002"
    more = f" --config {config}" if config is not None else ""
    return f"exec {warmroute} serve --port 18080 --admin-port 0 --policy {policy} {nodes}{more}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--harness", type=Path, metavar="DIR", help="directory that contains the harness, bench.py")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--policy", default="prefix_hash")
    parser.add_argument("--peers", default="vr-rr,sgl-rr,haproxy")
    parser.add_argument("--tokenizer", type=Path, metavar="DIR", help="compare with and without this tokenizer")
    add_record_option(parser)
    args = parser.parse_args()
    home = Path(os.environ.get("PEERBENCH_HOME", Path.home() / "peerbench"))
    if args.harness is None or not (args.harness / "bench.py").exists():
        parser.error("--harness DIR is required. DIR must contain bench.py, the harness that runs the routers")
    if not (home / "lg").exists():
        parser.error(f"{home} has no load generator (lg): run {args.harness}/setup first, or set PEERBENCH_HOME")
    report = Report()
    with tempfile.TemporaryDirectory() as folder:
        if args.tokenizer is not None:
            compare_tokenizer(args, Path(folder), report)
        else:
            names = ["ours", *args.peers.split(",")]
            rounds = ",".join(names * args.rounds)
            config = written(Path(folder) / "config.toml", HOLDS_ALL)
            rows = run_harness(args, Path(folder), rounds, start_line(args.policy, config), KNOWN, "A1,A16,A128,S10")
            # The memory is that of a router with default settings.
            rows += run_harness(args, Path(folder), rounds, start_line(args.policy), KNOWN, "L1", "--mem")
            show(rows, names, args.policy, report)
    report.value("load", load_average())
    report.value("build", build())
    report.record(args.record)
    return 0


def run_harness(
    args: argparse.Namespace, folder: Path, names: str, ours: str, conversations: str, scenarios: str, *more: str
) -> list[dict[str, Any]]:
    """Return the harness's rows, one for each router and scenario."""
    out = folder / "rows.jsonl"
    out.unlink(missing_ok=True)
    subprocess.run(
        [sys.executable, str(args.harness / "bench.py"), names, "--pin", *more, "--scen", scenarios,
         "--S", conversations, "--d", str(args.seconds), "--out", str(out)],
        env=os.environ | {"OURS": ours}, check=True, stdout=sys.stderr,
    )  # fmt: skip
    return [json.loads(line) for line in out.read_text().splitlines()]


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def compare_tokenizer(args: argparse.Namespace, folder: Path, report: Report) -> None:
    # the load generator starts once the tokenizer is loaded
    tokenizer = f'[startup]\nmax_wait_s = 120\n[[models]]\nname = "m"\ntokenizer = "{args.tokenizer.resolve()}"\n'
    known = start_line("price", written(folder / "known.toml", HOLDS_ALL + tokenizer))
    distinct = start_line("price", written(folder / "distinct.toml", tokenizer))
    text = start_line("price", written(folder / "text.toml", HOLDS_ALL))
    runs = {
        "vllm-router, round_robin": ("vr-rr", "", KNOWN, "A1,A16,A128,S10"),
        "exact tokens, known conversation": ("ours", known, KNOWN, "A1,A16,A128,S10"),
        "exact tokens, distinct prompts": ("ours", distinct, DISTINCT, "A1,A16,A128"),
        "text matching": ("ours", text, KNOWN, "A1,A16,A128,S10"),
    }
    results: dict[tuple[str, str], list[float]] = defaultdict(list)
    for _round in range(args.rounds):
        for title, (name, ours, conversations, scenarios) in runs.items():
            for row in run_harness(args, folder, name, ours, conversations, scenarios):
                if row["err"] or row["non2xx"]:
                    print(f"errors in {title} {row['scen']}: {row['err']} failed, {row['non2xx']} not 2xx")
                results[title, row["scen"]].append(float(row[SCENARIOS[row["scen"]].field]))
    base, *others = runs
    report.table("tokenizer", "", base, *(column for title in others for column in (title, f"{title} / vllm-router")))
    keys = {others[0]: "known", others[1]: "distinct", others[2]: "text"}
    for name in ("A1", "A16", "A128", "S10"):
        scenario = SCENARIOS[name]
        cells = [f"{statistics.median(results[base, name]):.1f}"]
        for title in others:
            figures = results[title, name]
            if not figures:
                cells += ["", ""]
                continue
            ratio = statistics.median(ours / peer for ours, peer in zip(figures, results[base, name], strict=True))
            cells += [f"{statistics.median(figures):.1f}", f"{ratio:.2f}"]
            report.values |= {
                f"{keys[title]}_{scenario.key}": cells[-2],
                f"{keys[title]}_ratio_{scenario.key}": cells[-1],
            }
        report.row(scenario.title, *cells)
    report.table("rounds", "", "router", "every round")
    for (title, name), figures in results.items():
        report.row(SCENARIOS[name].title, title, ", ".join(f"{figure:.1f}" for figure in figures))


def show(rows: list[dict[str, Any]], names: list[str], policy: str, report: Report) -> None:
    results: dict[tuple[str, str], list[float]] = defaultdict(list)
    for row in rows:
        if row["err"] or row["non2xx"]:
            print(f"errors in {row['name']} {row['scen']}: {row['err']} failed, {row['non2xx']} not 2xx")
        for name in ("IDLE", "MEM") if row["scen"] == "MEM" else (row["scen"],):
            results[row["name"].partition("@")[0], name].append(float(row[SCENARIOS[name].field]))
    titles = [f"Warmroute, {policy}", *(PEERS.get(name, name) for name in names[1:])]
    report.table("medians", "", *titles, "ours / vllm-router")
    for name, scenario in SCENARIOS.items():
        medians = [statistics.median(results[router, name] or [float("nan")]) for router in names]
        pairs = zip(results["ours", name], results["vr-rr", name], strict=False)
        ratio = f"{statistics.median([ours / peer for ours, peer in pairs] or [float('nan')]):.2f}"
        report.row(scenario.title, *(f"{median:.1f}" for median in medians), ratio)
        report.values |= {f"ours_{scenario.key}": f"{medians[0]:.1f}", f"ratio_{scenario.key}": ratio}
    report.table("rounds", "", "router", "every round")
    for name, scenario in SCENARIOS.items():
        for router, title in zip(names, titles, strict=True):
            report.row(scenario.title, title, ", ".join(f"{figure:.1f}" for figure in results[router, name]))
    for name in ("A1", "S10"):
        kernel = [row["sys_frac"] for row in rows if row["scen"] == name and row["name"].startswith("ours")]
        report.value(f"kernel_{SCENARIOS[name].key}", f"{statistics.median(kernel):.0%}")


if __name__ == "__main__":
    sys.exit(main())
