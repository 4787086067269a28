"""Commands from outside: what they print, and how they end."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from warmroute.cli.main import main

SHA = "0" * 64


def checked(capsys: pytest.CaptureFixture[str], path: Path, text: str) -> tuple[int, str]:
    path.write_text(text)
    code = main(["check-config", str(path)])
    return code, capsys.readouterr().err


# check-config.


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('[journal]\nfile = "/nowhere/at/all/j"', "journal.file: there is no folder /nowhere/at/all"),
        (
            '[scaling]\nenabled = true\n[[provisioners]]\nkind = "webhook"\nurl = "http://h"\n'
            'token_env = "NOT_SET_HERE"',
            "provisioners.token_env: the environment has no NOT_SET_HERE",
        ),
        (
            '[scaling]\nenabled = true\n[[provisioners]]\nkind = "kubernetes"\nworkload_name = "w"\ngpu = "L4"\n'
            'kubeconfig = "/nowhere/kube"',
            "provisioners.kubeconfig (kubernetes)",
        ),
    ],
)
def test_what_serve_could_not_make_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, sentence: str
) -> None:
    code, said = checked(capsys, tmp_path / "w.toml", text)
    assert code == 2 and sentence in said and str(tmp_path / "w.toml") in said


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            '[[nodes]]\nurl = "http://a"\nisland = "aws/eu"\n[[scaling.islands]]\nisland = "aws/eo"',
            "no node, provisioner or [[islands]] names 'aws/eo'; there are aws/eu",
        ),
        (
            f'[[keys]]\nsha256 = "{SHA}"\ntenant = "search"\n[[routes]]\nname = "r"\ntenant = "serch"',
            "routes: 'r' is for tenant 'serch', which no key has; there are search",
        ),
        ('[[provisioners]]\nkind = "process"\ngpu = "L4"\ncommand = ["vllm", "serve"]', "has no {port}"),
        (
            '[[provisioners]]\nkind = "webhook"\nurl = "http://h"\ntoken_env = "NOT_SET_HERE"',
            "it is not used while scaling.enabled is false",
        ),
    ],
)
def test_what_cannot_be_meant_is_a_warning(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, sentence: str
) -> None:
    code, said = checked(capsys, tmp_path / "w.toml", text)
    assert code == 0 and said.startswith("warning: ") and sentence in said and said.count("\n") == 1


def test_what_may_be_meant_is_not_warned_of(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = f"""
        [journal]
        file = "{tmp_path}/journal.jsonl"
        [[scaling.islands]]
        island = "aws/us-east-1"
        [[scaling.islands]]
        island = "local"
        [[provisioners]]
        kind = "ec2"
        regions = ["us-east-1"]
        instance_types = ["g6.xlarge"]
        launch_template = "t"
        [[provisioners]]
        kind = "process"
        gpu = "L4"
        command = ["engine", "--port={{port}}"]
        [[keys]]
        sha256 = "{SHA}"
        tenant = "team-a"
        [[routes]]
        name = "r"
        tenant = "team-*"
    """
    assert checked(capsys, tmp_path / "w.toml", text) == (0, "")


# load.


@contextmanager
def refusing(status: int, body: bytes) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (404, json.dumps({"error": {"message": "No node serves 'sim' [here]."}}), "No node serves 'sim' [here]."),
        (429, json.dumps({"error": {"message": "Too many wait."}}), "Too many wait."),
        (500, json.dumps({"object": "error", "message": "out of memory"}), "out of memory"),
        (502, "<html>\n bad gateway</html>", "<html> bad gateway</html>"),
    ],
)
def test_a_load_that_nobody_answers_says_why_and_fails(
    capsys: pytest.CaptureFixture[str], status: int, body: str, said: str
) -> None:
    with refusing(status, body.encode()) as url:
        code = main(["load", "unique_batch", "--url", url, "--limit", "3", "--rate", "100"])
    out, err = capsys.readouterr()
    assert code == 1 and f"3 × status {status}: {said}" in out
    assert f"none of 3 requests to {url} was answered" in err


# serve.


def serve_fails(*arguments: str) -> str:
    """As a process of its own: it sets up logs, which are everybody's."""
    command = [sys.executable, "-m", "warmroute.cli.main", "serve", *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2, ended.stderr
    return ended.stderr


def test_an_address_that_is_not_of_this_machine_is_said() -> None:
    said = serve_fails("--host", "192.0.2.1", "--port", "0")
    assert "this machine has no address 192.0.2.1" in said and "another port" not in said


def test_a_port_that_is_taken_is_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        said = serve_fails("--port", str(taken.getsockname()[1]))
    assert "is another process there? choose another port" in said
