"""Builds the fuzz targets and runs them, with AddressSanitizer, UndefinedBehaviorSanitizer and leak checks.

    python fuzz/run.py --runs 20000                     every target with gcc and the plain driver
    python fuzz/run.py --libfuzzer --runs 2000000       with clang and libFuzzer, which follows coverage
    python fuzz/run.py --target index --libfuzzer --merge   keep the corpus small: only what adds coverage

The kernel's C files and a target are linked with libpython. An input that fails is written to the build folder.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
KERNEL = ROOT / "src" / "warmroute" / "_kernel"
TARGETS = sorted(path.stem.removeprefix("fuzz_") for path in HERE.glob("fuzz_*.c"))
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
FLAGS = ["-O1", "-g", "-fno-omit-frame-pointer", "-Wall", "-Wextra", "-Werror", "-fvisibility=hidden"]
MAX_BYTES = {"index": 512, "message_tokens": 1024, "recency": 512, "sockets": 512}
"""Each byte of these is an operation or a part of one."""
OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=1:abort_on_error=1:detect_stack_use_after_return=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
}


def build(target_names: list[str], libfuzzer: bool) -> Path:
    """Build the targets, as far as their sources have changed. Returns the folder that they are in."""
    compiler = "clang" if libfuzzer else "gcc"
    folder = ROOT / "build" / "fuzz" / f"{compiler}-{sysconfig.get_python_version()}"
    folder.mkdir(parents=True, exist_ok=True)
    coverage = ["-fsanitize=fuzzer-no-link"] if libfuzzer else []
    include = [f"-I{sysconfig.get_path('include')}", f"-I{HERE}", f"-I{KERNEL}"]
    headers = max(path.stat().st_mtime for path in [*KERNEL.glob("*.h"), *HERE.glob("*.h"), Path(__file__)])

    def compile_file(source: Path) -> Path:
        out = folder / f"{source.parent.name}-{source.stem}.o"
        if not out.exists() or out.stat().st_mtime < max(source.stat().st_mtime, headers):
            own = [*coverage, "-Dgetrandom=fuzz_getrandom"] if source.parent == KERNEL else []
            run([compiler, *FLAGS, *SANITIZERS, *own, *include, "-c", str(source), "-o", str(out)])
        return out

    shared = [*KERNEL.glob("*.c"), HERE / "harness.c", *HERE.glob("check_*.c")]
    if not libfuzzer:
        shared.append(HERE / "driver.c")
    sources = [*shared, *(HERE / f"fuzz_{name}.c" for name in target_names)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = dict(zip(sources, pool.map(compile_file, sources), strict=True))
    for name in target_names:
        linked = [str(objects[source]) for source in [*shared, HERE / f"fuzz_{name}.c"]]
        fuzzer = ["-fsanitize=fuzzer"] if libfuzzer else []
        run([compiler, *SANITIZERS, *fuzzer, *linked, "-o", str(folder / name), *libpython()])
    return folder


def libpython() -> list[str]:
    """Return what links a program with this Python's library."""
    folder = sysconfig.get_config_var("LIBDIR")
    version = sysconfig.get_config_var("LDVERSION")
    libraries = f"{sysconfig.get_config_var('LIBS') or ''} {sysconfig.get_config_var('SYSLIBS') or ''}".split()
    return [f"-L{folder}", f"-Wl,-rpath,{folder}", f"-lpython{version}", *libraries, "-lm"]


def run(command: list[str], **more: object) -> None:
    done = subprocess.run(command, **more)  # type: ignore[call-overload]
    if done.returncode:
        sys.exit(f"failed: {' '.join(command)}")


def fuzz(folder: Path, target: str, runs: int, seed: int, libfuzzer: bool) -> dict[str, object]:
    """Run one target. Returns its figures; ends the program if an input fails."""
    environment = {**os.environ, **OPTIONS, "PYTHONHOME": sys.base_prefix, "PYTHONHASHSEED": "0"}
    seeds = HERE / "corpus" / target
    started = time.monotonic()
    if libfuzzer:
        found = folder / f"{target}.found"
        found.mkdir(exist_ok=True)
        command = [
            str(folder / target), str(found), str(seeds), f"-runs={runs}", f"-seed={seed}",
            f"-artifact_prefix={folder}/{target}-", "-print_final_stats=1",
            "-verbosity=0", "-rss_limit_mb=4096", "-entropic=0", f"-max_len={MAX_BYTES.get(target, 2048)}",
        ]  # fmt: skip
    else:
        command = [str(folder / target), str(seeds), str(runs), str(seed)]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
    output = done.stdout + done.stderr
    counted = re.search(r"number_of_executed_units: (\d+)|^(\d+) inputs$", output, re.MULTILINE)
    if done.returncode or counted is None:
        sys.exit(f"{target} failed:\n{output[-6000:]}")
    return {
        "target": target,
        "inputs": int(counted[1] or counted[2]),
        "seconds": round(time.monotonic() - started, 1),
        "driver": "libFuzzer" if libfuzzer else "fuzz/driver.c",
    }


def merge(folder: Path, target: str) -> None:
    """Add to the corpus in the repository what reaches code that it does not reach yet."""
    environment = {**os.environ, **OPTIONS, "PYTHONHOME": sys.base_prefix, "PYTHONHASHSEED": "0"}
    seeds = HERE / "corpus" / target
    seeds.mkdir(parents=True, exist_ok=True)
    command = [str(folder / target), "-merge=1", "-max_len=1024", str(seeds), str(folder / f"{target}.found")]
    run(command, env=environment, cwd=folder, stderr=subprocess.DEVNULL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", action="append", choices=TARGETS, help="Repeatable. All by default.")
    parser.add_argument("--runs", type=int, default=20_000, help="inputs for each target")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--libfuzzer", action="store_true", help="use clang and libFuzzer")
    parser.add_argument("--merge", action="store_true", help="after the run, add what reaches new code to the corpus")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    targets = options.target or TARGETS
    folder = build(targets, options.libfuzzer)
    figures = []
    for target in targets:
        figures.append(fuzz(folder, target, options.runs, options.seed, options.libfuzzer))
        print("{target}: {inputs:,} inputs in {seconds} s ({driver}), no failure".format(**figures[-1]), flush=True)
        if options.merge:
            merge(folder, target)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
