"""Calls to a router's admin listener, for the commands that ask a running router."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException, HTTPResponse
from typing import Any, Final
from urllib.error import HTTPError, URLError
from urllib.request import ProxyHandler, Request, build_opener

from warmroute.config import Config, ConfigError

TOKEN_ENV: Final = "WARMROUTE_ADMIN_TOKEN"
TIMEOUT_S: Final = 30.0


def add_admin_options(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    admin = f"http://{Config().admin.host}:{Config().admin.port}"
    parser.add_argument("--admin", default=admin, metavar="URL", help=f"admin listener (default: {admin})")
    parser.add_argument(
        "--token-env",
        default=TOKEN_ENV,
        metavar="NAME",
        help=f"environment variable with the admin token (default: {TOKEN_ENV})",
    )


def call_admin(args: argparse.Namespace, path: str, body: bytes | None = None, *, expect: str) -> dict[str, Any]:
    """Return the JSON of an endpoint, which must have the key `expect`. Raises ConfigError."""
    with open_admin(args, path, body) as response:
        found: dict[str, Any] = json.load(response)
        if expect not in found:
            raise ValueError("unexpected response")
        return found


@contextmanager
def open_admin(args: argparse.Namespace, path: str, body: bytes | None = None) -> Iterator[HTTPResponse]:
    """Open a response of the admin listener. Errors while it is opened or read become ConfigErrors."""
    url = args.admin.rstrip("/")
    if "://" not in url:
        url = f"http://{url}"
    token = os.environ.get(args.token_env, "")
    try:
        request = Request(url + path, body, {"Content-Type": "application/json"})
        if token:
            request.add_header("Authorization", f"Bearer {token}")
        with build_opener(ProxyHandler({})).open(request, timeout=TIMEOUT_S) as response:
            yield response
    except HTTPError as error:
        raise ConfigError(_http_error_message(error, url, args, bool(token))) from None
    except URLError as error:
        reason = getattr(error.reason, "strerror", None) or error.reason
        raise ConfigError(
            f"no router answers at {url} ({reason}); set --admin to its admin listener ([admin] in its configuration)"
        ) from None
    except (OSError, HTTPException, TypeError, ValueError) as error:
        raise ConfigError(f"the server at {url} is not the admin listener of a router: {error}") from None


def _http_error_message(error: HTTPError, url: str, args: argparse.Namespace, has_token: bool) -> str:
    try:
        body = json.load(error)["error"]
        message, code = str(body["message"]), body.get("code")
    except (OSError, ValueError, KeyError, TypeError):
        return f"the server at {url} is not the admin listener of a router: it answers {error.code}"
    if error.code == 401:
        name = args.token_env
        advice = f"the token in {name} is wrong" if has_token else f"set {name}, or use another variable"
        return f"the admin listener at {url} requires its token: {advice} (--token-env)"
    if code == "missing_tenant":
        return "the router requires API keys: name the tenant of the request (--tenant NAME)"
    if code == "unknown_tenant":
        return f"{message} Use a tenant of [[keys]] in the router's configuration (--tenant NAME)."
    if code == "too_many_viewers":
        return message
    if error.code in (429, 503):
        return f"the router would reject this request with {error.code} now: {message}"
    if error.code == 404 and "/metrics" in message:
        return f"the router at {url} is too old for {args.command}"
    return message
