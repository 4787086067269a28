"""moto's server on loopback: AWS in any number of regions. A gate in front of it adds what moto lacks: regions without
capacity, used-up quotas, calls that fail or hang.
"""

from __future__ import annotations

import io
import re
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any
from urllib.parse import parse_qs

import boto3
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

IMAGE = "ami-12c6146b"
"""An image that moto has in every region."""


class Moto:
    def __init__(self) -> None:
        self.refuse: dict[tuple[str, str], tuple[int, str, str]] = {}
        """By region and action: HTTP status, AWS's code, message."""
        self.hang_s: dict[str, float] = {}
        self.calls: list[tuple[str, str]] = []
        """Region and action of each call."""
        self.requests: list[dict[str, list[str]]] = []
        self.session = boto3.session.Session()
        """Shared, because reading AWS's API description takes a second."""
        self._clients: dict[str, Any] = {}
        self._app = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", 0, self._gate, threaded=True)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def client(self, region: str) -> Any:
        """Return a client to inspect the cloud, independent of the tested code."""
        if region not in self._clients:
            self._clients[region] = self.session.client("ec2", region_name=region, endpoint_url=self.url)
        return self._clients[region]

    def state(self, region: str, instance: str) -> str:
        found = self.client(region).describe_instances(InstanceIds=[instance])
        return str(found["Reservations"][0]["Instances"][0]["State"]["Name"])

    def reset(self) -> None:
        self.refuse.clear()
        self.hang_s.clear()
        self.calls.clear()
        self.requests.clear()

    def full(self, region: str) -> None:
        """The region has no capacity from now on."""
        message = "We currently do not have sufficient capacity in the Availability Zone you requested."
        self.refuse[region, "RunInstances"] = (500, "InsufficientInstanceCapacity", message)

    def _gate(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        environ["wsgi.input"] = io.BytesIO(body)
        scope = re.search(r"Credential=[^/]+/\d+/([^/]+)/", environ.get("HTTP_AUTHORIZATION", ""))
        request = parse_qs(body.decode())
        region, action = scope[1] if scope else "", request.get("Action", [""])[0]
        self.calls.append((region, action))
        self.requests.append(request)
        time.sleep(self.hang_s.get(region, 0.0))
        if (region, action) in self.refuse:
            status, code, message = self.refuse[region, action]
            start(f"{status} refused", [("content-type", "text/xml")])
            error = f"<Error><Code>{code}</Code><Message>{message}</Message></Error>"
            return [f"<Response><Errors>{error}</Errors><RequestID>r-1</RequestID></Response>".encode()]
        answer: Iterable[bytes] = self._app(environ, start)
        return answer
