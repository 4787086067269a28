"""A real API server: etcd, kube-apiserver and kube-controller-manager as processes on loopback, with RBAC on. There are
no nodes and no kubelet: a test writes what a kubelet would write about its Pods.

`make test-real-kubernetes` builds them from Debian's sources (tools/build_kubernetes.sh).
"""

from __future__ import annotations

import json
import os
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from support.free_port import free_port

BIN = Path(os.environ.get("WARMROUTE_KUBE_BIN", Path(__file__).resolve().parents[2] / ".venv-kube" / "bin"))
PARTS = ("etcd", "kube-apiserver", "kube-controller-manager")


def missing() -> list[str]:
    return [name for name in PARTS if not (BIN / name).exists()]


class RealCluster:
    real = True

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._children: list[subprocess.Popen[bytes]] = []
        etcd, peers, self.port = free_port(), free_port(), free_port()
        client, peer = f"http://127.0.0.1:{etcd}", f"http://127.0.0.1:{peers}"
        self._start(
            "etcd", "--data-dir", str(folder / "etcd"), "--listen-client-urls", client,
            "--advertise-client-urls", client, "--listen-peer-urls", peer,
            "--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}", "--unsafe-no-fsync",
        )  # fmt: skip
        (folder / "tokens.csv").write_text('admin,admin,1,"system:masters"\nrouter,router,2\n')
        key = folder / "accounts.key"
        subprocess.run(["openssl", "genrsa", "-out", str(key), "2048"], check=True, capture_output=True)
        self._start(
            "kube-apiserver", "--etcd-servers", client, "--secure-port", str(self.port), "--bind-address", "127.0.0.1",
            "--advertise-address", "127.0.0.1", "--cert-dir", str(folder / "certs"),
            "--token-auth-file", str(folder / "tokens.csv"), "--authorization-mode", "RBAC",
            "--service-cluster-ip-range", "10.0.0.0/24", "--disable-admission-plugins", "ServiceAccount",
            "--service-account-issuer", "https://localhost", "--service-account-key-file", str(key),
            "--service-account-signing-key-file", str(key),
        )  # fmt: skip
        self._wait_for("/readyz")
        self._start(
            "kube-controller-manager", "--kubeconfig", self.kubeconfig("admin"), "--port", "0", "--secure-port",
            str(free_port()), "--bind-address", "127.0.0.1", "--cert-dir", str(folder / "certs"),
            "--leader-elect=false", "--controllers",
            "deployment,replicaset,statefulset,garbagecollector,endpointslice,serviceaccount-token",
            "--service-account-private-key-file", str(key), "--root-ca-file", str(folder / "certs" / "apiserver.crt"),
        )  # fmt: skip

    def kubeconfig(self, user: str) -> str:
        """A file with which this user speaks to it."""
        path = self.folder / f"{user}.conf"
        server = {"server": f"https://127.0.0.1:{self.port}", "insecure-skip-tls-verify": True}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "c", "cluster": server}],
            "users": [{"name": user, "user": {"token": user}}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": user, "namespace": "default"}}],
            "current-context": "c",
        }
        path.write_text(json.dumps(config))
        return str(path)

    def request(self, method: str, path: str, body: Any = None, kind: str = "application/json") -> Any:
        """As the administrator."""
        import ssl

        request = urllib.request.Request(f"https://127.0.0.1:{self.port}{path}", method=method)
        request.add_header("authorization", "Bearer admin")
        request.add_header("content-type", kind)
        data = json.dumps(body).encode() if body is not None else None
        try:
            with urllib.request.urlopen(request, data, context=ssl._create_unverified_context(), timeout=10) as answer:
                text = answer.read()
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{method} {path}: {error.code}: {error.read().decode()[:500]}") from None
        return json.loads(text) if text.startswith(b"{") else text

    def close(self) -> None:
        for child in reversed(self._children):
            child.terminate()
        for child in self._children:
            try:
                child.wait(10)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()

    def _start(self, name: str, *arguments: str) -> None:
        with (self.folder / f"{name}.log").open("wb") as log:
            self._children.append(
                subprocess.Popen([str(BIN / name), *arguments], stdout=log, stderr=log, cwd=self.folder)
            )

    def _wait_for(self, path: str) -> None:
        until_s = time.monotonic() + 60
        while time.monotonic() < until_s:
            assert all(child.poll() is None for child in self._children), self._logs()
            try:
                self.request("GET", path)
            except (AssertionError, OSError):
                time.sleep(0.2)
            else:
                return
        raise AssertionError(f"the API server did not get ready: {self._logs()}")

    def _logs(self) -> str:
        return "\n".join(path.read_text(errors="replace")[-1500:] for path in self.folder.glob("*.log"))
