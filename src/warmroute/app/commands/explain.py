"""warmroute explain: why the router sent a request to its node, or where it would send a request now.

Without arguments it lists the latest decisions; with --failed, --tenant or --status, those that these name.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal
from urllib.parse import quote, urlencode

from warmroute.app.commands import TableColumn, add_admin_options, call_admin, console, fit_tables, whole
from warmroute.config import ConfigError
from warmroute.core.messages import FACTS

if TYPE_CHECKING:
    from rich.table import Table


MAX_NAME: Final = 32
"""Characters of a model's or tenant's name in the list."""
_IN_OUTCOME_LINE: Final = ("tenant", "model", "priority")
Decision = dict[str, Any]
"""As the admin API describes it."""


def add_to(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "explain", help="explain why a request went to its node, or where it would go now"
    )
    parser.add_argument(
        "request_id",
        nargs="?",
        metavar="REQUEST_ID",
        help="id of a past request (X-Request-Id); without it, the latest decisions",
    )
    parser.add_argument(
        "--request", metavar="FILE", help="JSON body of a request to explain without sending it (-: stdin)"
    )
    parser.add_argument("--path", help="path of that request (default: /v1/chat/completions)")
    parser.add_argument(
        "--header", action="append", default=[], metavar="'NAME: VALUE'", help="header of that request; repeatable"
    )
    parser.add_argument(
        "--tenant", help="tenant of that request, if the router requires API keys; without --request: list its requests"
    )
    parser.add_argument("--failed", action="store_true", help="list requests that failed, and why")
    parser.add_argument(
        "--status", type=whole(100, 599), metavar="CODE", help="list requests that ended with this HTTP status"
    )
    parser.add_argument("--limit", type=whole(1), metavar="COUNT", help="number of requests in a list (default: 20)")
    parser.add_argument("--journal", type=Path, metavar="FILE", help="look up the past request in a journal file")
    add_admin_options(parser)
    parser.add_argument("--json", action="store_true", help="print the decision as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.request_id and args.request:
        raise ConfigError("explain: give either REQUEST_ID or --request FILE, not both")
    if (args.failed or args.status or args.limit) and (args.request_id or args.request):
        raise ConfigError("explain: --failed, --status and --limit list past requests: give no REQUEST_ID or --request")
    if not args.request_id and not args.request:
        return _list(args)
    if args.request:
        if args.journal:
            raise ConfigError("explain: --journal is for past requests; it cannot be used with --request")
        decision = call_admin(args, "/admin/explain", _explain_body(args), expect="explanation")
    elif args.path or args.header or args.tenant is not None:
        raise ConfigError("explain: --path, --header and --tenant require --request")
    elif args.journal:
        decision = find_in_journal(args.journal, args.request_id)
    else:
        decision = call_admin(args, f"/admin/decisions/{quote(args.request_id, safe='')}", expect="explanation")
    if args.json:
        print(json.dumps(decision, indent=2, ensure_ascii=False))
    else:
        _print(decision)
    return 0


# From the router.


def _list(args: argparse.Namespace) -> int:
    if args.journal:
        raise ConfigError("explain: --journal needs a REQUEST_ID")
    if args.path or args.header:
        raise ConfigError("explain: --path and --header require --request")
    wanted = {"failed": int(args.failed) or None, "tenant": args.tenant, "status": args.status, "limit": args.limit}
    query = urlencode({name: value for name, value in wanted.items() if value is not None})
    decisions = call_admin(args, f"/admin/decisions?{query}", expect="decisions")["decisions"]
    if args.json:
        print(json.dumps(decisions, indent=2, ensure_ascii=False))
    elif not decisions:
        print("no matching requests" if query else "no decisions yet")
    else:
        _print_list(decisions)
    return 0


def _explain_body(args: argparse.Namespace) -> bytes:
    """Return the body for POST /admin/explain. It contains the request's body byte for byte."""
    try:
        body = sys.stdin.buffer.read() if args.request == "-" else Path(args.request).read_bytes()
        json.loads(body)
    except OSError as error:
        raise ConfigError(f"{args.request}: cannot read the file: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{args.request}: not JSON: {error}") from None
    headers: dict[str, str] = {}
    for line in args.header:
        name, colon, value = line.partition(":")
        if not colon:
            raise ConfigError(f"--header {line!r}: expected 'Name: value'")
        headers[name.strip()] = value.strip()
    fields: dict[str, Any] = {"headers": headers}
    if args.path:
        fields["path"] = args.path
    if args.tenant:
        fields["tenant"] = args.tenant
    return json.dumps(fields).encode()[:-1] + b', "body": ' + body + b"}"


# From a journal file.


def find_in_journal(path: Path, request_id: str) -> Decision:
    """Return the latest decision with this id from the file or its predecessor. Raises ConfigError."""
    searched = []
    for file in (path, path.with_name(path.name + ".1")):
        try:
            found = _latest(file, request_id)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise ConfigError(f"{file}: cannot read the file: {error.strerror}") from None
        searched.append(str(file))
        if found is not None:
            return found
    if not searched:
        raise ConfigError(f"{path}: the file does not exist; see journal.file in the router's configuration")
    raise ConfigError(
        f"no request {request_id!r} in {' and '.join(searched)}: it is older, still running, was rejected, or is not "
        "in the sample"
    )


def _latest(file: Path, request_id: str) -> Decision | None:
    found = None
    with file.open("rb") as lines:
        for line in lines:
            if request_id.encode() in line:
                try:
                    decision = json.loads(line)
                except ValueError:
                    continue  # the last line of a file that is being written
                if isinstance(decision, dict) and decision.get("request_id") == request_id:
                    found = decision
    return found


# Output.


def _print(decision: Decision) -> None:
    out = console()
    out.print(decision["explanation"], style="bold", markup=False, highlight=False, soft_wrap=True)
    if decision["candidates"]:
        for table in _candidate_tables(decision, out.width):
            out.print(table)
        hidden = decision["candidate_count"] - len(decision["candidates"])
        if hidden > 0:
            out.print(f"and {hidden:,} more", style="dim")
    for name in FACTS:
        if name not in _IN_OUTCOME_LINE and decision.get(name):
            out.print(f"{name}: {decision[name]}", markup=False, highlight=False)
    for line in _failed_lines(decision):
        out.print(line, markup=False, highlight=False, soft_wrap=True)
    if "outcome" in decision:
        out.print(_outcome_line(decision), markup=False, highlight=False, soft_wrap=True)


def _print_list(decisions: Sequence[Decision]) -> None:
    """Print a line of columns for each decision, and below it its explanation and what failed."""
    from rich.cells import cell_len

    today = datetime.now(UTC).date().isoformat()
    same_day = all(decision["time"].startswith(today) for decision in decisions)
    rows = [("time (UTC)", "status", "first token", "total", "model", "tenant", "request")]
    for decision in decisions:
        time = decision["time"][:19].replace("T", " ")
        ended = decision["outcome"] if decision["status"] is None or decision["outcome"] != "ok" else ""
        status = " ".join(str(part) for part in (decision["status"], ended) if part)
        duration = [_milliseconds(_first_token_ms(decision)), _milliseconds(decision["duration_ms"])]
        names = [_short(decision["model"]), _short(decision["tenant"])]
        rows.append((time[11:] if same_day else time, status, *duration, *names, decision["request_id"]))
    widths = [max(cell_len(row[at]) for row in rows) for at in range(len(rows[0]))]
    for number, row in enumerate(rows):
        cells = [
            " " * (width - cell_len(cell)) + cell if at in (2, 3) else cell + " " * (width - cell_len(cell))
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())
        if number:
            print(f"    {decisions[number - 1]['explanation']}")
            for line in _failed_lines(decisions[number - 1]):
                print(f"    {line}")


def _first_token_ms(decision: Decision) -> float | None:
    """Return None also for a response that is not streamed. A journal file of an older router does not say so."""
    found: float | None = decision["ttft_ms"] if decision.get("streamed", True) else None
    return found


def _milliseconds(value: float | None) -> str:
    return "–" if value is None else f"{_number(value)} ms"


def _short(name: str) -> str:
    shown = "".join(character if character.isprintable() else "?" for character in name)
    return (shown if len(shown) <= MAX_NAME else f"{shown[: MAX_NAME - 1]}…") or "–"


def _candidate_tables(decision: Decision, width: int) -> Iterator[Table]:
    from rich.text import Text

    candidates = decision["candidates"]
    terms = [term for term in candidates[0]["terms_ms"] if any(one["terms_ms"][term] for one in candidates)]

    def column(head: str, texts: Iterable[str], justify: Literal["left", "right"] = "right") -> TableColumn:
        styles = ["bold" if one["chosen"] else "" for one in candidates]
        return TableColumn(head, [Text(text, style) for text, style in zip(texts, styles, strict=True)], justify)

    keys = [column("", ("→" if one["chosen"] else "" for one in candidates), "left")]
    keys.append(column("node", (one["node"] for one in candidates), "left"))
    if len({one["island"] for one in candidates}) > 1:
        keys.append(column("island", (one["island"] for one in candidates), "left"))
    shown = [column("price, ms", (_number(one["total_ms"]) for one in candidates))]
    shown += [column(term, [_number(one["terms_ms"][term]) for one in candidates]) for term in terms]
    shown.append(column("cached tokens", (f"{one['cached_tokens']:,}" for one in candidates)))
    shown.append(column("new tokens", (f"{one['new_tokens']:,}" for one in candidates)))
    return fit_tables(keys, shown, width, framed=False)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 99.5 else f"{value:.1f}"


def _failed_lines(decision: Decision) -> Iterator[str]:
    """One line for each node that failed at the request. A journal file of an older router has none."""
    for failed in decision.get("failed_tries", ()):
        what = "" if failed["role"] == "whole" else f" ({failed['role']})"
        line = f"{failed['node']}{what}: {failed['reason']}"
        if failed["duration_ms"] is not None:
            line += f" after {_number(failed['duration_ms'])} ms"
        error = failed["error"]
        if error is not None:
            about = "an error of another kind" if error["class"] == "other" else error["class"].replace("_", " ")
            named = ", ".join(f"{key} {error[key]}" for key in ("type", "code") if error[key])
            line += f"; the engine says: {about} ({f'{named}, ' if named else ''}{error['length']:,} bytes)"
            if error.get("text"):
                line += f": {error['text']}"
        yield line


def _outcome_line(decision: Decision) -> str:
    tenant = f", tenant {decision['tenant']}" if decision["tenant"] else ""
    parts = [
        f"{decision['time']}, model {decision['model']}, {decision['priority']} priority{tenant}: {decision['outcome']}"
    ]
    if decision["status"]:
        parts.append(f"status {decision['status']}")
    first_token_ms = _first_token_ms(decision)
    if first_token_ms is not None:
        parts.append(f"first token after {_number(first_token_ms)} ms")
    if decision["duration_ms"] is not None:
        parts.append(f"{_number(decision['duration_ms'])} ms in total")
    reported = decision["reported"]
    prompt = reported["prompt_tokens"] or 0
    if (cached := reported["cached_tokens"]) is not None:
        parts.append(f"{min(cached, prompt):,} of {prompt:,} prompt tokens cached")
    if 0 < prompt < (decision["cached_tokens"] or 0):
        parts.append(
            f"its node reports {prompt:,} prompt tokens, fewer than the {decision['cached_tokens']:,} that were "
            "expected to be cached: sums and estimates count no more"
        )
    if reported["output_tokens"] is not None:
        parts.append(f"{reported['output_tokens']:,} output tokens")
    return ", ".join(parts)
