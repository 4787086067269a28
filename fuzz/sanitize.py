"""The kernel under AddressSanitizer, UndefinedBehaviorSanitizer and LeakSanitizer: its tests, then its fuzzers.

    python fuzz/sanitize.py                 the tests, and 20,000 inputs for each fuzzer (gcc alone is enough)
    python fuzz/sanitize.py --full          the tests, and over 10 million inputs with libFuzzer (needs clang; an hour)

`--full` writes what it counted to bench/results/sanitize.json. The sanitized extension is built into build/sanitize, so
the one that everything else imports stays as it is.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from datetime import date
from pathlib import Path

import run as fuzzers

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "sanitize"
RESULT = ROOT / "bench" / "results" / "sanitize.json"
TESTS = [
    "tests/kernel/test_body_buffer.py",
    "tests/kernel/test_forwarded_heads.py",
    "tests/kernel/test_kernel_module.py",
    "tests/kernel/test_response_tail.py",
    "tests/cluster/test_messages.py",
    "tests/cluster/test_peer_load.py",
    "tests/edge/test_broken_responses.py",
    "tests/edge/test_client_disconnects.py",
    "tests/edge/test_first_token_search.py",
    "tests/edge/test_http_kernel.py",
    "tests/edge/test_socket_transport.py",
    "tests/index",
    "tests/prompt/test_body_fields.py",
    "tests/prompt/test_request_body.py",
    "tests/routing/test_accounting.py",
    "tests/routing/test_hits_kernel.py",
    "tests/routing/test_price_kernel.py",
    "tests/routing/test_rendezvous.py",
    "tests/telemetry/test_traffic.py",
]
MEASURES_MEMORY_OR_TIME = "not flat and not memory and not bytes and not fast and not quick and not time"
"""Sanitizers change how much memory and time everything takes."""
FULL_RUNS = {
    "body_scan": 2_000_000,
    "first_token": 500_000,
    "http_chunks": 2_000_000,
    "http_head": 2_500_000,
    "index": 700_000,
    "message_tokens": 700_000,
    "recency": 700_000,
    "sockets": 1_000_000,
    "usage": 2_500_000,
}


def build_extension() -> None:
    environment = {**os.environ, "WARMROUTE_DEV": "1", "WARMROUTE_SANITIZE": "1"}
    command = [sys.executable, "setup.py", "-q", "build", f"--build-base={BUILD}/temp", f"--build-lib={BUILD}/lib"]
    fuzzers.run(command, cwd=ROOT, env=environment)


def run_tests() -> dict[str, object]:
    """Run the kernel's tests against the sanitized extension."""
    library = subprocess.run(["gcc", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    environment = {
        **os.environ,
        "LD_PRELOAD": library.stdout.strip(),
        "PYTHONMALLOC": "malloc",
        "PYTHONPATH": f"{BUILD}/lib:{ROOT}/fuzz",
        "ASAN_OPTIONS": "detect_leaks=1:leak_check_at_exit=0:allocator_may_return_null=1",
        "LSAN_OPTIONS": f"suppressions={ROOT}/fuzz/leaks_of_others.supp:print_suppressions=0",
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
    }
    command = [
        sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "leak_check", "-o", "timeout=1200",
        "-k", MEASURES_MEMORY_OR_TIME, *TESTS,
    ]  # fmt: skip
    started = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    print(done.stdout[-3000:], flush=True)
    if done.returncode:
        sys.exit("the kernel's tests failed under the sanitizers")
    return {"summary": done.stdout.strip().splitlines()[-1], "seconds": round(time.monotonic() - started, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="over 10 million inputs with libFuzzer, written to a file")
    parser.add_argument("--runs", type=int, default=20_000, help="inputs for each fuzzer, without --full")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    build_extension()
    tests = run_tests()
    folder = fuzzers.build(fuzzers.TARGETS, libfuzzer=options.full)
    figures = []
    for target in fuzzers.TARGETS:
        runs = FULL_RUNS[target] if options.full else options.runs
        figures.append(fuzzers.fuzz(folder, target, runs, options.seed, libfuzzer=options.full))
        print("{target}: {inputs:,} inputs in {seconds} s ({driver}), no failure".format(**figures[-1]), flush=True)
    if options.full:
        compilers = [subprocess.run([name, "--version"], capture_output=True, text=True) for name in ("gcc", "clang")]
        result = {
            "command": "python fuzz/sanitize.py --full",
            "date": date.today().isoformat(),
            "python": platform.python_version(),
            "compilers": [done.stdout.splitlines()[0] for done in compilers],
            "tests": tests,
            "fuzzed_inputs": sum(int(str(figure["inputs"])) for figure in figures),
            "failures": 0,
            "fuzzers": figures,
        }
        RESULT.parent.mkdir(parents=True, exist_ok=True)
        RESULT.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
