"""warmroute explain: why a request went where it went, or where it would go now."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.error import HTTPError, URLError
from urllib.parse import quote
from urllib.request import ProxyHandler, Request, build_opener

from warmroute.config import Config, ConfigError

if TYPE_CHECKING:
    from rich.table import Table

TOKEN_ENV: Final = "WARMROUTE_ADMIN_TOKEN"
TIMEOUT_S: Final = 30.0
Told = dict[str, Any]


def add_to(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "explain", help="say why a request went where it went, or where it would go now"
    )
    admin = f"http://{Config().admin.host}:{Config().admin.port}"
    parser.add_argument("request_id", nargs="?", metavar="REQUEST_ID", help="of a past request (X-Request-Id)")
    parser.add_argument(
        "--request", metavar="FILE", help="a request's body, as JSON: where would it go now? (-: stdin)"
    )
    parser.add_argument("--path", help="the path that it would be sent to (/v1/chat/completions)")
    parser.add_argument("--header", action="append", default=[], metavar="'NAME: VALUE'", help="of it; repeat for more")
    parser.add_argument("--tenant", help="whose request it would be, where clients need keys")
    parser.add_argument("--journal", type=Path, metavar="FILE", help="look the past request up in a journal's file")
    parser.add_argument("--admin", default=admin, metavar="URL", help=f"the router's admin listener ({admin})")
    parser.add_argument(
        "--token-env", default=TOKEN_ENV, metavar="NAME", help=f"environment variable with its token ({TOKEN_ENV})"
    )
    parser.add_argument("--json", action="store_true", help="print all that is known, as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.request_id and args.request:
        raise ConfigError("explain: the id of a past request and --request FILE are two questions: give one")
    if not args.request_id and not args.request:
        raise ConfigError("explain: give the id of a past request, or --request FILE")
    if args.request:
        if args.journal:
            raise ConfigError("explain: --journal is for past requests, --request asks the router")
        told = _ask(args, "/admin/explain", _rehearsed(args))
    elif args.path or args.header or args.tenant:
        raise ConfigError("explain: --path, --header and --tenant go with --request")
    elif args.journal:
        told = find(args.journal, args.request_id)
    else:
        told = _ask(args, f"/admin/decisions/{quote(args.request_id, safe='')}")
    if args.json:
        print(json.dumps(told, indent=2, ensure_ascii=False))
    else:
        _print(told)
    return 0


# From the router.


def _rehearsed(args: argparse.Namespace) -> bytes:
    """What POST /admin/explain takes; the body goes there byte for byte."""
    try:
        body = sys.stdin.buffer.read() if args.request == "-" else Path(args.request).read_bytes()
        json.loads(body)
    except OSError as error:
        raise ConfigError(f"{args.request}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{args.request}: is not JSON: {error}") from None
    headers: dict[str, str] = {}
    for line in args.header:
        name, colon, value = line.partition(":")
        if not colon:
            raise ConfigError(f"--header {line!r}: is not like 'Name: value'")
        headers[name.strip()] = value.strip()
    told: Told = {"headers": headers}
    if args.path:
        told["path"] = args.path
    if args.tenant:
        told["tenant"] = args.tenant
    return json.dumps(told).encode()[:-1] + b', "body": ' + body + b"}"


def _ask(args: argparse.Namespace, path: str, body: bytes | None = None) -> Told:
    url = args.admin.rstrip("/")
    if "://" not in url:
        url = f"http://{url}"
    token = os.environ.get(args.token_env, "")
    try:
        request = Request(url + path, body, {"Content-Type": "application/json"})
        if token:
            request.add_header("Authorization", f"Bearer {token}")
        with build_opener(ProxyHandler({})).open(request, timeout=TIMEOUT_S) as answer:
            told: Told = json.load(answer)
        if "sentence" not in told:
            raise ValueError("it answers something else")
        return told
    except HTTPError as error:
        raise ConfigError(_refused(error, url, args.token_env, bool(token))) from None
    except URLError as error:
        reason = getattr(error.reason, "strerror", None) or error.reason
        raise ConfigError(
            f"no router answers at {url} ({reason}); --admin names its admin listener ([admin] in its configuration)"
        ) from None
    except (OSError, HTTPException, TypeError, ValueError) as error:
        raise ConfigError(f"what answers at {url} is not a router's admin listener: {error}") from None


def _refused(error: HTTPError, url: str, token_env: str, has_token: bool) -> str:
    try:
        told = json.load(error)["error"]
        said, code = str(told["message"]), told.get("code")
    except (OSError, ValueError, KeyError, TypeError):
        return f"what answers at {url} is not a router's admin listener: it says {error.code}"
    if error.code == 401:
        why = f"the token in {token_env} is not its own" if has_token else f"put it into {token_env}, or name another"
        return f"the admin listener at {url} needs its token: {why} (--token-env)"
    if code == "missing_tenant":
        return "clients need a key there: say whose request it is (--tenant NAME)"
    if code == "unknown_tenant":
        return f"{said} --tenant takes those of [[keys]] in the router's configuration"
    if error.code in (429, 503):
        return f"it would be refused with {error.code} now: {said}"
    if error.code == 404 and "/metrics" in said:
        return f"the router at {url} is too old to explain"
    return said


# From a journal's file.


def find(path: Path, request_id: str) -> Told:
    """The latest decision of that id, in the file or in the one before it. Raises ConfigError."""
    looked_into = []
    for file in (path, path.with_name(path.name + ".1")):
        try:
            found = _latest(file, request_id)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise ConfigError(f"{file}: cannot be read: {error.strerror}") from None
        looked_into.append(str(file))
        if found is not None:
            return found
    if not looked_into:
        raise ConfigError(f"{path}: there is no such file; [journal] file in the router's configuration names it")
    raise ConfigError(
        f"no request {request_id!r} is in {' and '.join(looked_into)}: it is older, still runs, was refused, or was "
        "not sampled (journal.sample)"
    )


def _latest(file: Path, request_id: str) -> Told | None:
    found = None
    for line in _lines(file):
        if request_id.encode() in line:
            try:
                told = json.loads(line)
            except ValueError:
                continue  # the end of a file that is being written
            if isinstance(told, dict) and told.get("request_id") == request_id:
                found = told
    return found


def _lines(file: Path) -> Iterator[bytes]:
    with file.open("rb") as lines:
        yield from lines


# For people.


def _print(told: Told) -> None:
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console = Console(width=200)
    console.print(told["sentence"], style="bold", markup=False, highlight=False)
    if told["candidates"]:
        console.print(_table(told))
        left_out = told["considered"] - len(told["candidates"])
        if left_out > 0:
            console.print(f"and {left_out:,} more", style="dim")
    if told.get("route"):
        console.print(f"by the settings of route {told['route']}", markup=False, highlight=False)
    if "outcome" in told:
        console.print(_ending(told), markup=False, highlight=False)


def _table(told: Told) -> Table:
    from rich.table import Table
    from rich.text import Text

    candidates = told["candidates"]
    terms = [term for term in candidates[0]["terms_ms"] if any(one["terms_ms"][term] for one in candidates)]
    islands = len({one["island"] for one in candidates}) > 1
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("")
    table.add_column("node")
    if islands:
        table.add_column("island")
    for head in ("price, ms", *terms, "warm", "new"):
        table.add_column(head, justify="right")
    for one in candidates:
        cells = ["→" if one["chosen"] else "", Text(one["node"])]
        if islands:
            cells.append(Text(one["island"]))
        cells.append(_number(one["total_ms"]))
        cells += [_number(one["terms_ms"][term]) for term in terms]
        cells += [f"{one['cached_tokens']:,}", f"{one['new_tokens']:,}"]
        table.add_row(*cells, style="bold" if one["chosen"] else "")
    return table


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 99.5 else f"{value:.1f}"


def _ending(told: Told) -> str:
    who = f"{told['priority']} priority" + (f", tenant {told['tenant']}" if told["tenant"] else "")
    parts = [f"{told['time']}, model {told['model']}, {who}: {told['outcome']}"]
    if told["status"]:
        parts.append(f"status {told['status']}")
    if told["first_byte_ms"] is not None:
        parts.append(f"first byte after {_number(told['first_byte_ms'])} ms")
    if told["took_ms"] is not None:
        parts.append(f"{_number(told['took_ms'])} ms in all")
    reported = told["reported"]
    if reported["cached_tokens"] is not None:
        parts.append(f"{reported['cached_tokens']:,} of {reported['prompt_tokens'] or 0:,} tokens were cached")
    if reported["output_tokens"] is not None:
        parts.append(f"{reported['output_tokens']:,} tokens of answer")
    return ", ".join(parts)
