"""A fake API server with the behaviour that the provisioner relies on: resource versions and 409, merge and strategic
patches, the status subresource, label selectors, Pods that controllers create, and the order in which a ReplicaSet ends
them. It proves nothing about Kubernetes: the same tests run against a real API server with `make test-real-kubernetes`
(real_kubernetes.py).
"""

from __future__ import annotations

import copy
import itertools
import json
import re
import threading
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

Object = dict[str, Any]

WORKLOADS = ("deployments", "statefulsets", "leaderworkersets")
HASH = "5d4f8c7b9"
"""The hash of every Pod template."""


class Refused(Exception):
    def __init__(self, code: int, message: str) -> None:
        self.code, self.message = code, message


class FakeCluster:
    real = False

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._things: dict[tuple[str, str], Object] = {}
        self._version = itertools.count(1)
        self._reconciling = False
        self._changed = threading.Condition(self._lock)
        self._log: list[tuple[int, str, str, Object]] = []
        """Each change: version, type, sort, object."""
        self._latest = 0
        self._oldest = 0
        """Watches from an earlier version get 410."""
        self._epoch = 0
        self.watches = 0
        """Watches that were started."""
        self.fails_with = 0
        """Status of all answers, if set."""
        cluster = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                if "watch=true" in self.path and not cluster.fails_with:
                    self.send_response(200)
                    self.send_header("connection", "close")
                    self.end_headers()
                    self.close_connection = True
                    try:
                        for event in cluster.events(self.path):
                            self.wfile.write(json.dumps(event).encode() + b"\n")
                    except OSError:
                        pass  # the client has left
                    return
                length = int(self.headers.get("content-length") or 0)
                body = json.loads(self.rfile.read(length)) if length else None
                try:
                    code, answer = (
                        200,
                        cluster.handle(self.command, self.path, body, self.headers["content-type"] or ""),
                    )
                except Refused as refused:
                    code = refused.code
                    answer = {"kind": "Status", "status": "Failure", "code": code, "message": refused.message}
                data = json.dumps(answer).encode()
                self.send_response(code)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = do_PATCH = do_DELETE = answer

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def kubeconfig(self, user: str) -> str:
        path = self.folder / f"{user}.conf"
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{self._server.server_port}"}}],
            "users": [{"name": user, "user": {"token": user}}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": user, "namespace": "default"}}],
            "current-context": "c",
        }
        path.write_text(json.dumps(config))
        return str(path)

    def request(self, method: str, path: str, body: Any = None, kind: str = "application/json") -> Any:
        try:
            return self.handle(method, path, copy.deepcopy(body), kind)
        except Refused as refused:
            raise AssertionError(f"{method} {path}: {refused.code}: {refused.message}") from None

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def handle(self, method: str, target: str, body: Any, kind: str) -> Object:
        url = urlsplit(target)
        parts = re.sub(r"^/(api/v1|apis/[^/]+/[^/]+)/(namespaces/[^/]+/)?", "", url.path).split("/")
        sort, name, sub = (*parts, "", "")[:3]
        if self.fails_with and kind == "":
            raise Refused(self.fails_with, "the cluster is not well")
        with self._lock:
            if method == "POST" and sub == "binding":
                return self._write(sort, name, {"spec": {"nodeName": body["target"]["name"]}})
            if method == "POST":
                return self._create(sort, body)
            if method == "GET" and not name:
                selector = parse_qs(url.query).get("labelSelector", [""])[0]
                found = [one for one in self._all(sort) if matches(unquote(selector), _labels(one))]
                version = {"resourceVersion": str(self._latest)}
                return {"kind": "List", "metadata": version, "items": copy.deepcopy(found)}
            if (sort, name) not in self._things:
                raise Refused(404, f'{sort} "{name}" not found')
            if method == "GET":
                return copy.deepcopy(self._things[sort, name])
            if method == "DELETE":
                return self._delete(sort, name, (body or {}).get("gracePeriodSeconds") == 0)
            assert method == "PATCH", method
            if kind == "application/strategic-merge-patch+json":
                self._merge_conditions(sort, name, body)
            else:
                assert kind == "application/merge-patch+json", kind
            # Only the status subresource writes the status, and it writes nothing else.
            kept = {
                key: value for key, value in body.items() if (key == "status") == (sub == "status") or key == "metadata"
            }
            return self._write(sort, name, kept)

    def insert(self, sort: str, thing: Object) -> None:
        """Add what a real API server would refuse."""
        with self._lock:
            self._create(sort, thing)

    # Watches.

    def _record(self, kind: str, sort: str, thing: Object) -> None:
        self._latest = next(self._version)
        thing["metadata"]["resourceVersion"] = str(self._latest)
        self._log.append((self._latest, kind, sort, copy.deepcopy(thing)))
        self._changed.notify_all()

    def end_watches(self, forget: bool = False) -> None:
        """End all watches. `forget`: their versions are too old from now on."""
        with self._lock:
            self._epoch += 1
            if forget:
                self._latest = next(self._version)
                self._oldest = self._latest
            self._changed.notify_all()

    def events(self, target: str) -> Iterator[Object]:
        url = urlsplit(target)
        sort = url.path.rpartition("/")[2]
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        version, selector = int(query["resourceVersion"]), query.get("labelSelector", "")
        with self._lock:
            epoch = self._epoch
            self.watches += 1
        while True:
            with self._lock:
                if version < self._oldest:
                    yield {"type": "ERROR", "object": {"kind": "Status", "code": 410, "message": "too old"}}
                    return
                fresh = [one for one in self._log if one[0] > version]
                version = self._latest
                if not fresh and epoch == self._epoch:
                    self._changed.wait(5)
            for _version, kind, changed, thing in fresh:
                if changed == sort and matches(selector, _labels(thing)):
                    yield {"type": kind, "object": thing}
            if fresh:
                bookmark = {"kind": "Pod", "metadata": {"resourceVersion": str(version)}}
                yield {"type": "BOOKMARK", "object": bookmark}
            if epoch != self._epoch:
                return

    def _all(self, sort: str) -> Iterator[Object]:
        return (one for (kind, _name), one in list(self._things.items()) if kind == sort)

    def _create(self, sort: str, thing: Object) -> Object:
        meta = thing["metadata"]
        if (sort, meta["name"]) in self._things:
            raise Refused(409, f"{sort} {meta['name']!r} already exists")
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        meta |= {"uid": str(uuid.uuid4()), "creationTimestamp": now, "namespace": "default"}
        thing.setdefault("status", {"phase": "Pending"} if sort == "pods" else {"replicas": 0})
        self._things[sort, meta["name"]] = thing
        thing["serial"] = next(self._version)  # finer than its time, for the controllers' order
        return self._write(sort, meta["name"], {})

    def _write(self, sort: str, name: str, patch: Object) -> Object:
        thing = self._things[sort, name]
        expected = patch.get("metadata", {}).pop("resourceVersion", None)
        if expected is not None and expected != thing["metadata"]["resourceVersion"]:
            raise Refused(409, "the object has been modified; please apply your changes to the latest version")
        merge(thing, patch)
        self._record("MODIFIED" if "resourceVersion" in thing["metadata"] else "ADDED", sort, thing)
        self._reconcile()
        return copy.deepcopy(thing)

    def _merge_conditions(self, sort: str, name: str, patch: Object) -> None:
        """A strategic patch merges conditions by type."""
        patched = patch.get("status", {}).get("conditions")
        if patched:
            kept = {one["type"]: one for one in self._things[sort, name]["status"].get("conditions", [])}
            for one in patched:
                kept[one["type"]] = kept.get(one["type"], {}) | one
            patch["status"]["conditions"] = list(kept.values())

    def _delete(self, sort: str, name: str, at_once: bool = False) -> Object:
        thing = self._things[sort, name]
        if sort == "pods" and thing["spec"].get("nodeName") and not at_once:
            # Its kubelet would end it within its grace period.
            thing["metadata"]["deletionTimestamp"] = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            self._record("MODIFIED", sort, thing)
        else:
            del self._things[sort, name]
            self._record("DELETED", sort, thing)
        self._reconcile()
        return copy.deepcopy(thing)

    def _reconcile(self) -> None:
        """Do what the controllers do, at once."""
        if self._reconciling:
            return
        self._reconciling = True
        for sort in WORKLOADS[:2]:
            for workload in self._all(sort):
                labels = dict(workload["spec"]["selector"]["matchLabels"])
                owner = _owner(workload, sort)
                if sort == "deployments":
                    labels["pod-template-hash"] = HASH
                pods = [pod for pod in self._all("pods") if owner in _owners(pod) and _live(pod)]
                wanted = workload["spec"].get("replicas", 1)
                for _ in range(wanted - len(pods)):
                    name = f"{workload['metadata']['name']}-{uuid.uuid4().hex[:5]}"
                    if sort == "statefulsets":
                        name = f"{workload['metadata']['name']}-{len(pods)}"
                    spec = copy.deepcopy(workload["spec"]["template"]["spec"])
                    notes = copy.deepcopy(workload["spec"]["template"]["metadata"].get("annotations", {}))
                    named = {"name": name, "labels": labels, "annotations": notes, "ownerReferences": [owner]}
                    pods.append(self._create("pods", {"metadata": named, "spec": spec}))
                order = (lambda pod: -_ordinal(pod)) if sort == "statefulsets" else deletion_order
                for pod in sorted(pods, key=order)[: max(0, len(pods) - wanted)]:
                    self._delete("pods", pod["metadata"]["name"])
        self._reconciling = False


def deletion_order(pod: Object) -> tuple[Any, ...]:
    """Sort key of a ReplicaSet's deletions: without a node, pending, unknown, not ready, cheapest, newest."""
    status = pod.get("status", {})
    found = [one for one in status.get("conditions", ()) if one["type"] == "Ready" and one["status"] == "True"]
    ready, since = bool(found), found[0].get("lastTransitionTime") if found else None
    since_s = datetime.fromisoformat(since.replace("Z", "+00:00")).timestamp() if since else 0.0
    cost = int(pod["metadata"].get("annotations", {}).get("controller.kubernetes.io/pod-deletion-cost", 0))
    phase = {"Pending": 0, "Unknown": 1}.get(status.get("phase", "Pending"), 2)
    return bool(pod["spec"].get("nodeName")), phase, ready, cost, -since_s, -pod.get("serial", 0)


def merge(thing: Object, patch: Object) -> None:
    """RFC 7386."""
    for key, value in patch.items():
        if value is None:
            thing.pop(key, None)
        elif isinstance(value, dict):
            if not isinstance(thing.get(key), dict):
                thing[key] = {}
            merge(thing[key], value)
        else:
            thing[key] = value


def matches(selector: str, labels: dict[str, str]) -> bool:
    for part in re.split(r",(?![^()]*\))", selector) if selector else ():
        among = re.fullmatch(r"(\S+) (in|notin) \((.*)\)", part)
        if among:
            good = (labels.get(among[1]) in among[3].split(",")) == (among[2] == "in")
        elif "=" in part:
            key, _, value = part.partition("=")
            good = labels.get(key) == value
        else:
            good = part in labels if not part.startswith("!") else part[1:] not in labels
        if not good:
            return False
    return True


def _labels(one: Object) -> dict[str, str]:
    return one["metadata"].get("labels") or {}


def _owner(workload: Object, sort: str) -> Object:
    """Return the owner reference of its Pods. A Deployment's Pods name its ReplicaSet, which does not exist here."""
    meta = workload["metadata"]
    owner = {"apiVersion": "apps/v1", "controller": True}
    if sort == "deployments":
        return owner | {"kind": "ReplicaSet", "name": f"{meta['name']}-{HASH}", "uid": f"rs-{meta['uid']}"}
    return owner | {"kind": "StatefulSet", "name": meta["name"], "uid": meta["uid"]}


def _owners(pod: Object) -> list[Object]:
    return pod["metadata"].get("ownerReferences") or []


def _live(pod: Object) -> bool:
    return "deletionTimestamp" not in pod["metadata"] and pod["status"].get("phase") not in ("Succeeded", "Failed")


def _ordinal(pod: Object) -> int:
    return int(pod["metadata"]["name"].rpartition("-")[2])
