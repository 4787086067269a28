"""Calls to a router's admin listener, for the commands that ask a running router.

They find it by, in this order: --admin URL, the [admin] table of --config FILE, the environment variable
WARMROUTE_ADMIN_URL, the default address.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, Request, build_opener

from warmroute import config as configuration
from warmroute.config import Config, ConfigError

URL_ENV: Final = "WARMROUTE_ADMIN_URL"
TOKEN_ENV: Final = "WARMROUTE_ADMIN_TOKEN"
TIMEOUT_S: Final = 30.0
LOOPBACK: Final = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "[::1]", "*": "127.0.0.1"}
"""How to reach a listener on all addresses of this machine."""


class AdminAddress(NamedTuple):
    url: str
    origin: str
    """What named it, for errors."""


def add_admin_options(parser: argparse.ArgumentParser | argparse._ArgumentGroup, with_config: bool = True) -> None:
    """`with_config`: add --config, which some commands have already for another purpose."""
    parser.add_argument(
        "--admin", metavar="URL",
        help=f"admin listener of the router (default: that of --config, {URL_ENV}, or {_default_url()})",
    )  # fmt: skip
    if with_config:
        parser.add_argument(
            "--config",
            type=Path,
            metavar="FILE",
            help="configuration file of the router, which names its admin listener",
        )
    parser.add_argument(
        "--token-env",
        default=TOKEN_ENV,
        metavar="NAME",
        help=f"environment variable with the admin token (default: {TOKEN_ENV})",
    )


def _default_url() -> str:
    return f"http://{Config().admin.host}:{Config().admin.port}"


def find_admin(args: argparse.Namespace) -> AdminAddress:
    """Return where the router's admin listener is, and what says so. Raises ConfigError."""
    if args.admin is not None:
        return _checked(args.admin, "--admin")
    if args.config is not None:
        admin = configuration.load(args.config).admin
        origin = f"[admin] in {args.config}"
        if not admin.enabled:
            raise ConfigError(f"{origin} has enabled = false: this router has no admin listener")
        if not admin.port:
            raise ConfigError(
                f"{origin} has port = 0, so the router picked a free port: its log names it (--admin URL)"
            )
        host = LOOPBACK.get(admin.host) or (f"[{admin.host}]" if ":" in admin.host else admin.host)
        return AdminAddress(f"http://{host}:{admin.port}", origin)
    if url := os.environ.get(URL_ENV, "").strip():
        return _checked(url, URL_ENV)
    return AdminAddress(_default_url(), "the default")


def _checked(url: str, origin: str) -> AdminAddress:
    text = url.strip().rstrip("/")
    if "://" not in text:
        text = f"http://{text}"
    try:
        parts = urlsplit(text)
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is none
        is_valid = False
    if not is_valid or not text.isprintable() or " " in text:
        raise ConfigError(f"{origin}: {url[:200]!r} is not the URL of an admin listener; expected http://host:port")
    return AdminAddress(text, origin)


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
    address = find_admin(args)
    shown = f"{address.url} ({address.origin})"
    token = os.environ.get(args.token_env, "")
    try:
        request = Request(address.url + path, body, {"Content-Type": "application/json"})
        if token:
            request.add_header("Authorization", f"Bearer {token}")
        with build_opener(ProxyHandler({})).open(request, timeout=TIMEOUT_S) as response:
            yield response
    except HTTPError as error:
        raise ConfigError(_http_error_message(error, shown, args, bool(token))) from None
    except URLError as error:
        reason = getattr(error.reason, "strerror", None) or error.reason
        raise ConfigError(
            f"no router answers at {shown}: {reason}. Name its admin listener with --admin URL, --config FILE or "
            f"{URL_ENV}"
        ) from None
    except (OSError, HTTPException, TypeError, ValueError) as error:
        raise ConfigError(f"the server at {shown} is not the admin listener of a router: {error}") from None


def _http_error_message(error: HTTPError, shown: str, args: argparse.Namespace, has_token: bool) -> str:
    try:
        body = json.load(error)["error"]
        message, code = str(body["message"]), body.get("code")
    except (OSError, ValueError, KeyError, TypeError):
        return f"the server at {shown} is not the admin listener of a router: it answers {error.code}"
    if error.code == 401:
        name = args.token_env
        advice = f"the token in {name} is wrong" if has_token else f"set {name}, or use another variable"
        return f"the admin listener at {shown} requires its token: {advice} (--token-env)"
    if code == "missing_tenant":
        return "the router requires API keys: name the tenant of the request (--tenant NAME)"
    if code == "unknown_tenant":
        return f"{message} Use a tenant of [[keys]] in the router's configuration (--tenant NAME)."
    if code == "unknown_node":
        return f"{message.partition('. ')[0]}; `warmroute nodes` lists all"
    if code == "too_many_viewers":
        return message
    if error.code in (429, 503):
        return f"the router would reject this request with {error.code} now: {message}"
    if error.code == 404 and "/metrics" in message:
        return f"the router at {shown} is too old for {args.command}"
    return message
