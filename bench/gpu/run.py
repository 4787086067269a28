"""Compares routing policies in front of four real engines on one GPU: `transformers serve`, an 8 B shape.

On a machine with a package index:

    bench/gpu/assets.sh build/gpu TOKENIZER_DIR

On the GPU machine (offline; its python3 has torch and transformers), from the repository's root:

    python3 bench/gpu/run.py prepare --assets build/gpu            environment, model, engines: about 2 minutes
    python3 bench/gpu/run.py measure --round 1 --out DIR           all policies once: about 3 minutes
    python3 bench/gpu/run.py measure --round 2 --round 3 --out DIR
    python3 bench/gpu/run.py stop

Engines run on until `stop`. Each measurement starts a router of its own and sends prompts that no earlier one sent.
Then `.venv/bin/python bench/gpu/record_runs.py DIR/gpu-*.json` writes bench/results/gpu.json, for the docs.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from chat import Load, Run

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
Command = list[str | Path]
POLICIES = ("round_robin", "least_loaded", "prefix_hash", "price")
FIRST_PORT = 8001
BLOCK_TOKENS = 32
START_S = 240.0
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1", "DO_NOT_TRACK": "1"}


# The environment and the engines.


def lent_packages() -> list[str]:
    """Return the folders in which this Python finds torch and transformers."""
    code = "import torch, transformers as t; print(*{p.__file__.rsplit('/', 2)[0] for p in (torch, t)}, sep='\\n')"
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return found.stdout.split()


def make_environment(folder: Path, assets: Path) -> None:
    """Install the router and the engine's server from wheels. torch and transformers are lent by this Python."""
    pip: Command = [
        folder / "bin/python",
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--no-index",
    ]
    if not (folder / "ready").exists():
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        [site] = (folder / "lib").glob("python3*/site-packages")
        (site / "lent.pth").write_text("\n".join(lent_packages()) + "\n")
        wheels: Command = ["--find-links", assets / "wheels", "--requirement", assets / "requirements.txt"]
        subprocess.run([*pip, *wheels], check=True)
        (folder / "ready").touch()
    subprocess.run([*pip, "--force-reinstall", "--no-deps", "--no-build-isolation", ROOT], check=True)


def start_engines(work: Path, options: argparse.Namespace) -> None:
    """Start engines that outlive this process, and wait until all of them answer."""
    python, model = work / "venv/bin/python", work / "model"
    device = (
        ["--dtype", "bfloat16", "--cb-use-cuda-graph"]
        if options.shape == "8b"
        else ["--device", "cpu", "--dtype", "float32"]
    )
    processes = []
    for number in range(options.engines):
        port = FIRST_PORT + number
        with (work / f"engine-{number}.log").open("ab") as log:
            process = subprocess.Popen(
                [
                    python, "-m", "transformers.cli.transformers", "serve", model, "--continuous-batching", *device,
                    "--cb-block-size", str(BLOCK_TOKENS), "--cb-num-blocks", str(options.blocks),
                    "--cb-max-batch-tokens", "2048", "--host", "127.0.0.1", "--port", str(port),
                    "--log-level", "warning",
                ],
                stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=os.environ | ENVIRONMENT, start_new_session=True,
            )  # fmt: skip
        processes.append(process)
        (work / "pids").write_text(" ".join(str(each.pid) for each in processes))
    for number, process in enumerate(processes):
        wait_until_answers(f"http://127.0.0.1:{FIRST_PORT + number}/health", process, work / f"engine-{number}.log")
    settings = {"engines": options.engines, "blocks": options.blocks, "model": str(model)}
    (work / "engines.json").write_text(json.dumps(settings))


def wait_until_answers(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline_s = time.monotonic() + START_S
    while time.monotonic() < deadline_s:
        if process.poll() is not None:
            break
        try:
            with urllib.request.urlopen(url, timeout=2) as answer:
                if answer.status == 200:
                    return
        except OSError:
            time.sleep(0.3)
    sys.exit(f"{url} does not answer:\n{log.read_text()[-3000:]}")


def prepare(options: argparse.Namespace) -> None:
    work = options.work
    work.mkdir(parents=True, exist_ok=True)
    started_s = time.monotonic()

    def done(what: str) -> None:
        print(f"{what}: {time.monotonic() - started_s:.0f} s", flush=True)

    make_environment(work / "venv", options.assets)
    done("environment")
    if not (work / "model/config.json").exists():
        command = [
            work / "venv/bin/python",
            HERE / "make_model.py",
            options.shape,
            options.assets / "tokenizer",
            work / "model",
        ]
        subprocess.run(command, check=True, env=os.environ | ENVIRONMENT)
    done("model")
    stop(options)
    start_engines(work, options)
    done("engines")
    # The first requests of an engine compile and record its graphs.
    model = json.loads((work / "engines.json").read_text())["model"]
    for number in range(options.engines):
        Run(FIRST_PORT + number, model, f"warm-{number}", Load(2, 4, 2, 500, 8)).start()
    done("warm")


def stop(options: argparse.Namespace) -> None:
    pids = options.work / "pids"
    if pids.exists():
        for pid in map(int, pids.read_text().split()):
            try:
                os.killpg(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        pids.unlink()


# Measuring.


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def router(work: Path, policy: str) -> Iterator[tuple[int, int]]:
    """Run the router in front of the engines; give its port and the admin port."""
    engines = json.loads((work / "engines.json").read_text())
    port, admin_port = free_port(), free_port()
    model = json.dumps(engines["model"])
    nodes = "".join(
        f'[[nodes]]\nname = "gpu-{number}"\nurl = "http://127.0.0.1:{FIRST_PORT + number}"\nmodels = [{model}]\n'
        for number in range(engines["engines"])
    )
    config = work / "router.toml"
    config.write_text(
        f'[listen]\nport = {port}\n[admin]\nport = {admin_port}\n[routing]\npolicy = "{policy}"\n'
        f"[index]\nassumed_cache_tokens = {engines['blocks'] * BLOCK_TOKENS}\n"
        f'[journal]\nresponse_headers = "on_request"\n'
        f"[[models]]\nname = {model}\ntokenizer = {model}\n{nodes}"
    )
    with (work / "router.log").open("ab") as log:
        command: Command = [work / "venv/bin/python", "-m", "warmroute", "serve", "--config", config]
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=work)
    try:
        wait_until_answers(f"http://127.0.0.1:{port}/ready", process, work / "router.log")
        time.sleep(2.0)  # the tokenizer is loaded in a thread
        yield port, admin_port
    finally:
        process.terminate()
        process.wait(20)


def learned_speeds(admin_port: int) -> dict[str, Any]:
    with urllib.request.urlopen(f"http://127.0.0.1:{admin_port}/admin/nodes", timeout=5) as answer:
        nodes = json.load(answer)["nodes"]
    return {node["name"]: node.get("prefill_ms_per_token") for node in nodes}


def measure(options: argparse.Namespace) -> None:
    load = Load(options.clients, options.conversations, options.turns, options.document_words, options.output_tokens)
    work, runs = options.work, []
    options.out.mkdir(parents=True, exist_ok=True)
    result = options.out / f"gpu-{'-'.join(map(str, options.round))}.json"
    model = json.loads((work / "engines.json").read_text())["model"]
    for number in options.round:
        for policy in options.policy or POLICIES:
            with router(work, policy) as (port, admin_port):
                run = Run(port, model, f"{policy} {number} {os.getpid()}", load)
                run.start()
                figures = {
                    "policy": policy,
                    "round": number,
                    **run.figures(),
                    "prefill_ms_per_token": learned_speeds(admin_port),
                }
            runs.append(figures)
            print(json.dumps(figures), flush=True)
            result.write_text(json.dumps({"machine": machine(), "load": vars(load), "runs": runs}, indent=1) + "\n")


def machine() -> str:
    try:
        query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        gpu = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        gpu = "no GPU"
    return f"{gpu}, {os.cpu_count()} cores, Python {sys.version.split()[0]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("/tmp/warmroute-gpu"), help="environment, model, logs")
    stages = parser.add_subparsers(required=True)
    stage = stages.add_parser("prepare", help="environment, model and engines")
    stage.add_argument("--assets", type=Path, required=True, help="folder made by assets.sh")
    stage.add_argument("--shape", choices=("8b", "tiny"), default="8b", help="tiny: on the CPU, to try this script")
    stage.add_argument("--engines", type=int, default=4)
    stage.add_argument("--blocks", type=int, default=1100, help="KV blocks of each engine")
    stage.set_defaults(run=prepare)
    stage = stages.add_parser("measure", help="one run of each policy and round")
    stage.add_argument("--round", type=int, action="append", required=True, help="Repeatable.")
    stage.add_argument("--policy", choices=POLICIES, action="append", help="Repeatable. All by default.")
    stage.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")), help="folder of the result file")
    for name in ("clients", "conversations", "turns", "document_words", "output_tokens"):
        stage.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(Load, name))
    stage.set_defaults(run=measure)
    stages.add_parser("stop", help="end the engines").set_defaults(run=stop)
    options = parser.parse_args()
    options.work = options.work.resolve()
    options.run(options)


if __name__ == "__main__":
    main()
