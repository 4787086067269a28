"""Runs the commands of a quick start as a new user would: those of the page, in its order, in an empty directory."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from textwrap import dedent

ROOT = Path(__file__).resolve().parents[2]
URL = "http://127.0.0.1:{port}{path}"
WAIT = f"for turn in $(seq 200); do curl -sfo /dev/null {URL} && break; kill -0 $!; sleep 0.5; done\n"
WAIT_FOR_TOKENIZER = "for turn in $(seq 200); do grep -q tokenizer_loaded router.log && break; sleep 0.5; done\n"


def blocks_of(page: str) -> list[str]:
    """Return the indented blocks of a page, as a reader with real engines would copy them."""
    text = (ROOT / "docs" / "guides" / page).read_text().partition("## Without a GPU")[0]
    found = re.findall(r"^(?: {4}.*\n)+", text, re.M)
    return [dedent(block).strip() for block in found]


def follow(
    page: str, folder: Path, environment: Mapping[str, str], is_engine: Callable[[str], bool], skipped: tuple[str, ...]
) -> tuple[list[str], str]:
    """Follow a page with two engines. Return the output of each block, and the router's log.

    Engines and `warmroute serve` run in the background, as in terminals of their own. `skipped`: how blocks begin that
    are not run.
    """
    script, engines = "", 0
    for block in blocks_of(page):
        if block.startswith(skipped):
            continue
        if is_engine(block):
            engines += 1
            script += f"{block} > engine{engines}.log 2>&1 &\n"
            if engines == 2:
                script += WAIT.format(port=8000, path="/health") + WAIT.format(port=8001, path="/health")
        elif block.startswith("warmroute serve"):
            script += f"{block} > router.log 2>&1 &\n" + WAIT.format(port=8080, path="/ready") + WAIT_FOR_TOKENIZER
        else:
            script += f"echo '###'\n{block}\n"
    own_network, setup = list[str](), ""
    if os.geteuid() == 0:  # in a network of its own, the page's ports are free
        own_network, setup = ["unshare", "--net", "--fork", "--kill-child"], "ip link set lo up\n"
    command = [*own_network, "bash", "-euc", f"{setup}trap 'kill $(jobs -p)' EXIT\n{script}"]
    done = subprocess.run(
        command, cwd=folder, env=os.environ | environment, capture_output=True, text=True, check=False
    )
    log = (folder / "router.log").read_text() if (folder / "router.log").exists() else ""
    assert done.returncode == 0, "\n".join(part[-3000:] for part in (done.stdout, done.stderr, log))
    return done.stdout.split("###\n")[1:], log


def cached_tokens(output: str) -> list[int]:
    return [int(number) for number in re.findall(r'"cached_tokens": *(\d+)', output)]
