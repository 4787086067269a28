#!/usr/bin/env python3
"""A complete program for the provisioner kind `command`. It starts engines as processes on this machine; replace
`start`, `list_machines` and `stop` by calls to your cloud.

    [[provisioners]]
    kind = "command"
    command = ["examples/provisioner.py", "--state", "/var/lib/my-cloud", "--engine", "vllm serve MODEL --port {port}"]
    pass_env = ["CUDA_*", "HF_HOME"]

The router runs the program with one more argument (`offers`, `provision`, `status` or `terminate`), writes a JSON
object to its standard input, and reads a JSON object from its standard output. The protocol is in
docs/reference/provisioners.md.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

HOST = "127.0.0.1"
OFFER = {
    "name": "local/cpu",  # stays the same from one call to the next
    "gpu": "cpu",  # nodes with the same value count as equally fast
    "usd_per_hour": 0.05,  # of the whole node
    "gpus": 1,
    "spot": False,
    "island": "local",
    "start_s": 20,
    "round_trip_ms": 0.1,
    "max_nodes": 2,
    "my_rack": "r7",  # your own fields come back with `provision`
}


class NoCapacity(Exception):
    pass


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--state", type=Path, required=True, help="directory with a file for each machine")
    parser.add_argument("--engine", required=True, help="command that starts an engine; {port} is replaced")
    parser.add_argument("--first-port", type=int, default=9100)
    parser.add_argument("call", choices=("offers", "provision", "status", "terminate"))
    options = parser.parse_args()
    request = json.load(sys.stdin)
    folder = options.state / request["deployment"]  # each deployment has its own machines
    folder.mkdir(parents=True, exist_ok=True)
    answer: dict[str, Any] = {}
    try:
        if options.call == "offers":
            answer = {"offers": [OFFER]}
        elif options.call == "provision":
            start(folder, request["offer"], request["token"], options.engine, options.first_port)
        elif options.call == "status":
            answer = {"machines": list_machines(folder)}
        else:
            stop(folder, request["machine"])
    except NoCapacity as reason:
        answer = {"error": {"code": "no_capacity", "message": str(reason)}}
    print(json.dumps(answer))
    return 0


def start(folder: Path, offer: dict[str, Any], token: str, engine: str, first_port: int) -> None:
    """Start a machine. A second call with the same token must start nothing."""
    file = folder / f"{token}.json"
    if file.exists():
        return
    machines = [one for one in list_machines(folder) if one["state"] != "terminated"]
    if len(machines) >= offer["max_nodes"]:
        raise NoCapacity(f"{len(machines)} machines run, maximum is {offer['max_nodes']}")
    taken = {one["my_port"] for one in machines}
    port = next(port for port in range(first_port, 65536) if port not in taken and is_free(port))
    machine = {"id": f"{folder.name}-{token}", "token": token, "offer": offer["name"], "my_port": port, "my_pid": 0}
    file.write_text(json.dumps(machine))  # before the process starts: a crash in between must not hide the machine
    with (folder / f"{token}.log").open("wb") as log:
        command = [word.replace("{port}", str(port)) for word in shlex.split(engine)]
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            env={**os.environ, "MY_CLOUD_TOKEN": token},
        )  # fmt: skip
    file.write_text(json.dumps(machine | {"my_pid": process.pid}))


def list_machines(folder: Path) -> list[dict[str, Any]]:
    """Return every machine of this deployment, and no other: the router adopts and may terminate what it finds here."""
    machines = []
    for file in sorted(folder.glob("*.json")):
        machine = json.loads(file.read_text())
        running = is_running(machine)
        machine["state"] = "running" if running else "terminated"
        machine["url"] = f"http://{HOST}:{machine['my_port']}" if running else ""
        machine["reason"] = "" if running else "the process has ended"
        machines.append(machine)
    return machines


def stop(folder: Path, machine: dict[str, Any]) -> None:
    """Terminate a machine. One that is gone already is no error. `machine` is what `list_machines` returned."""
    if is_running(machine):
        os.killpg(machine["my_pid"], signal.SIGTERM)
    (folder / f"{machine['token']}.json").unlink(missing_ok=True)


def is_running(machine: dict[str, Any]) -> bool:
    """Return whether the process runs. Its token tells it from another process with the same id."""
    try:
        status = Path(f"/proc/{machine['my_pid']}/stat").read_text().rpartition(")")[2].split()[0]
        environment = Path(f"/proc/{machine['my_pid']}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    return status != "Z" and f"MY_CLOUD_TOKEN={machine['token']}".encode() in environment


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((HOST, port)) != 0


if __name__ == "__main__":
    sys.exit(main())
