"""Commands: output and exit status."""

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

from warmroute.app.main import main

SHA = "0" * 64


def check_config(capsys: pytest.CaptureFixture[str], path: Path, text: str) -> tuple[int, str]:
    path.write_text(text)
    code = main(["check-config", str(path)])
    return code, capsys.readouterr().err


# check-config.


def test_check_config_takes_the_file_like_other_commands_too(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "c.toml"
    file.write_text("[listen]\nport = 8080\n")
    assert main(["check-config", "--config", str(file)]) == 0
    assert main(["check-config", str(file)]) == 0
    assert main(["check-config"]) == 2 and "needs one FILE" in capsys.readouterr().err


def test_check_config_reports_tokenizers_beside_other_problems(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    text = '[journal]\nfile = "/nowhere/j"\n[[models]]\nname = "m"\ntokenizer = "/nope"'
    code, message = check_config(capsys, tmp_path / "c.toml", text)
    assert code == 2 and "journal.file" in message and "cannot load the tokenizer of 'm'" in message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[journal]\nfile = "/nowhere/at/all/j"', "journal.file: the directory /nowhere/at/all does not exist"),
        (
            '[scaling]\nenabled = true\n[[provisioners]]\nkind = "webhook"\nurl = "http://h"\n'
            'token_env = "NOT_SET_HERE"',
            "provisioners.token_env: the environment variable NOT_SET_HERE is not set",
        ),
        (
            '[scaling]\nenabled = true\n[[provisioners]]\nkind = "kubernetes"\nworkload_name = "w"\ngpu = "L4"\n'
            'kubeconfig = "/nowhere/kube"',
            "provisioners.kubeconfig (kubernetes)",
        ),
    ],
)
def test_check_config_rejects_what_serve_could_not_start(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, message: str
) -> None:
    code, printed = check_config(capsys, tmp_path / "w.toml", text)
    assert code == 2 and message in printed and str(tmp_path / "w.toml") in printed


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '[[nodes]]\nurl = "http://a"\nisland = "aws/eu"\n[[scaling.islands]]\nisland = "aws/eo"',
            "no node or provisioner is on island 'aws/eo'; known islands: aws/eu",
        ),
        (
            '[[nodes]]\nurl = "http://a"\n[[islands]]\nname = "aws/eu"',
            "islands: no node or provisioner is on island 'aws/eu'; known islands: local",
        ),
        (
            f'[[keys]]\nsha256 = "{SHA}"\ntenant = "search"\n[[routes]]\nname = "r"\ntenant = "serch"',
            "routes: no key has the tenant 'serch' of route 'r'; known tenants: search",
        ),
        ('[[provisioners]]\nkind = "process"\ngpu = "L4"\ncommand = ["vllm", "serve"]', "has no {port}"),
        (
            '[[provisioners]]\nkind = "webhook"\nurl = "http://h"\ntoken_env = "NOT_SET_HERE"',
            "(the provisioner is unused while scaling.enabled is false)",
        ),
    ],
)
def test_check_config_warns_of_probable_mistakes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, message: str
) -> None:
    code, printed = check_config(capsys, tmp_path / "w.toml", text)
    assert code == 0 and printed.startswith("warning: ") and message in printed and printed.count("\n") == 1


def test_check_config_does_not_warn_of_valid_names(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
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
    assert check_config(capsys, tmp_path / "w.toml", text) == (0, "")


def test_check_config_reports_everything_that_serve_would_refuse(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NOT_SET_HERE", raising=False)
    (tmp_path / "empty.jinja").write_text("")
    (tmp_path / "key.pem").write_text("no key")
    path = tmp_path / "w.toml"
    text = f"""
        [listen]
        tls_cert = "{tmp_path}/key.pem"
        tls_key = "{tmp_path}/key.pem"
        [upstream]
        ca_file = "/nowhere/ca.pem"
        [journal]
        file = "/nowhere/journal"
        [[models]]
        name = "m"
        tokenizer = "/nowhere/model"
        chat_template = "{tmp_path}/empty.jinja"
        [[nodes]]
        url = "http://a"
        api_key_env = "NOT_SET_HERE"
    """
    expected = [
        "listen.tls_cert and listen.tls_key: cannot load the files",
        "upstream.ca_file",
        "journal.file: the directory /nowhere does not exist",
        "models: cannot load the tokenizer of 'm': /nowhere/model: No such file or directory",
        "models: cannot load the chat template of 'm'",
        "nodes.api_key_env: the environment variable NOT_SET_HERE, which has the API key of http://a, is not set",
    ]
    code, printed = check_config(capsys, path, text)
    lines = printed.splitlines()
    assert code == 2 and len(lines) == len(expected), printed
    for line, words in zip(lines, expected, strict=True):
        assert line.startswith(f"warmroute: {path}: {words}"), line
    assert serve_fails("--config", str(path), "--port", "0", "--admin-port", "0").splitlines() == lines


def test_check_config_loads_the_tokenizers(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokenizer.json").write_text("[")
    text = "".join(f'[[models]]\nname = "{name}"\ntokenizer = "{tmp_path}/{name}"\n' for name in ("one", "two"))
    code, printed = check_config(capsys, tmp_path / "w.toml", text)
    assert code == 2 and printed.count("cannot load the tokenizer of") == 2


def test_serve_logs_the_warnings_of_check_config(tmp_path: Path) -> None:
    path = tmp_path / "w.toml"
    path.write_text('[listen]\nhost = "192.0.2.1"\n[[nodes]]\nurl = "http://a"\n[[islands]]\nname = "aws/eu"\n')
    logged = serve_fails("--config", str(path))
    assert "config_warning: islands: no node or provisioner is on island 'aws/eu'; known islands: local" in logged


# load.


@contextmanager
def failing_endpoint(status: int, body: bytes) -> Iterator[str]:
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
    ("status", "body", "message"),
    [
        (404, json.dumps({"error": {"message": "No node serves 'sim' [here]."}}), "No node serves 'sim' [here]."),
        (429, json.dumps({"error": {"message": "Too many wait."}}), "Too many wait."),
        (500, json.dumps({"object": "error", "message": "out of memory"}), "out of memory"),
        (502, "<html>\n bad gateway</html>", "<html> bad gateway</html>"),
    ],
)
def test_load_fails_with_the_reason_if_no_request_succeeds(
    capsys: pytest.CaptureFixture[str], status: int, body: str, message: str
) -> None:
    with failing_endpoint(status, body.encode()) as url:
        code = main(["load", "unique_batch", "--url", url, "--limit", "3", "--rate", "100"])
    out, err = capsys.readouterr()
    assert code == 1 and f"3 × status {status}: {message}" in out
    assert f"none of the 3 requests to {url} succeeded" in err


# serve.


def serve_fails(*arguments: str) -> str:
    """Run `serve` in its own process, because it configures logging. Return its error output."""
    command = [sys.executable, "-m", "warmroute", "serve", *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2, ended.stderr
    return ended.stderr


def test_serve_reports_an_address_of_another_machine() -> None:
    message = serve_fails("--host", "192.0.2.1", "--port", "0")
    assert "this machine has no address 192.0.2.1" in message and "another port" not in message


def test_serve_reports_a_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        message = serve_fails("--port", str(listening.getsockname()[1]))
    assert "another process uses the port; choose another one (`listen.port` or --port," in message
