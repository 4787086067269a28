"""What the commands share: arguments, tables, the terminal, calls to an admin API."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, NoReturn
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, Request, build_opener

from warmroute import config as configuration
from warmroute.config import Config, ConfigError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table
    from rich.text import Text

    from warmroute.lab.summary import Run


# Types of command-line arguments: numbers within bounds, and files that a command will write. Their errors say what
# was expected. A command checks its arguments before it starts to work.

MAX_WARM_UP_S = 604_800.0
_WHOLE = re.compile(r"\s*[-+]?[0-9](_?[0-9]){0,17}\s*")


class Parser(argparse.ArgumentParser):
    """Reports a wrong argument in one sentence, without the list of all options."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message.removeprefix('argument ')} (`{self.prog} --help` lists the options)\n")


def whole(minimum: int | None = None, maximum: int | None = None) -> Callable[[str], int]:
    """A whole number within bounds."""

    def convert(text: str) -> int:
        value = int(text) if _WHOLE.fullmatch(text) else None
        if value is None or (minimum is not None and value < minimum) or (maximum is not None and value > maximum):
            raise argparse.ArgumentTypeError(f"expected {_range('a whole number', minimum, maximum)}, got {text!r}")
        return value

    return convert


def number(
    minimum: float | None = None, maximum: float | None = None, *, above: float | None = None
) -> Callable[[str], float]:
    """A finite number within bounds."""

    def convert(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        is_valid = (
            math.isfinite(value)
            and (above is None or value > above)
            and (minimum is None or value >= minimum)
            and (maximum is None or value <= maximum)
        )
        if not is_valid:
            expected = f"a number above {above:g}" if above is not None else _range("a number", minimum, maximum)
            raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")
        return value

    return convert


def several(convert: Callable[[str], float]) -> Callable[[str], list[float]]:
    """Numbers separated by commas."""
    return lambda text: [convert(word) for word in text.split(",")]


def _range(what: str, minimum: float | None, maximum: float | None) -> str:
    if minimum is not None and maximum is not None:
        return f"{what} from {minimum:,} to {maximum:,}"
    if minimum is not None:
        return f"{what} of at least {minimum:,}"
    return what


class WarmUp(NamedTuple):
    """What a replay does not measure: the first requests, or those of the first seconds."""

    requests: int = 0
    seconds: float = 0.0


def add_warm_up_option(parser: argparse._ActionsContainer) -> None:
    def convert(text: str) -> WarmUp:
        if text.strip().endswith("s"):
            return WarmUp(seconds=number(0.0, MAX_WARM_UP_S)(text.strip().removesuffix("s")))
        return WarmUp(whole(0)(text))

    parser.add_argument(
        "--warm-up",
        type=convert,
        default=WarmUp(),
        metavar="N",
        help="do not measure the first N requests; with an s, such as 3600s, those of the first N seconds (default: 0)",
    )


port = whole(0, 65_535)
fraction = number(0.0, 1.0)


def output_file(text: str) -> Path:
    """A file that the command can write at its end. It is not created yet."""
    path = Path(text)
    folder = path.parent
    problem = ""
    if not text:
        problem = "its name is empty"
    elif path.is_dir():
        problem = "it is a directory"
    elif not folder.is_dir():
        problem = f"the directory {folder} does not exist"
    elif not os.access(path if path.exists() else folder, os.W_OK):
        problem = "this user has no permission to write it"
    if problem:
        raise argparse.ArgumentTypeError(f"cannot write the file {text!r}: {problem}")
    return path


# Tables that fit the terminal: columns that have no room go into a further table, below the first one.

_FRAME: Final = 3
"""Characters that a column takes besides its content: a line and two spaces."""
_HEAD: Final = 9
"""A longer head is broken into lines."""


@dataclass(frozen=True, slots=True)
class TableColumn:
    head: str
    cells: Sequence[Text]
    """The cells of the column, one for each row."""
    justify: Literal["left", "right"] = "right"

    @property
    def width(self) -> int:
        from rich.cells import cell_len

        words = [cell_len(word) for word in self.head.split()]
        return max([min(cell_len(self.head), _HEAD), *words, *(cell.cell_len for cell in self.cells)])

    @property
    def full_width(self) -> int:
        """Width of the column with its head in one line."""
        from rich.cells import cell_len

        return max(self.width, cell_len(self.head))

    @property
    def head_lines(self) -> str:
        return "\n".join(wrap(self.head, self.width, break_long_words=False)) if self.head else ""


def fit_tables(
    keys: Sequence[TableColumn],
    columns: Sequence[TableColumn],
    width: int,
    title: str = "",
    sections: Sequence[int] = (),
    framed: bool = True,
) -> Iterator[Table]:
    """Yield tables of at most `width` characters. Each has the key columns, which name the rows, and some others.

    `sections`: numbers of the rows that end a section. A key that is too long is broken into lines.
    """
    if 1 + sum(column.full_width + _FRAME for column in (*keys, *columns)) <= width:
        yield _table(keys, columns, title, sections, width, framed, break_heads=False)
        return
    key_width = _key_width(keys, width, max((column.width for column in columns), default=0))
    room = width - 1 - sum(min(column.width, key_width) + _FRAME for column in keys)
    at = 0
    while at < len(columns):
        count, left = 1, room - columns[at].width - _FRAME
        while at + count < len(columns) and columns[at + count].width + _FRAME <= left:
            left -= columns[at + count].width + _FRAME
            count += 1
        yield _table(keys, columns[at : at + count], title if at == 0 else "", sections, key_width, framed)
        at += count


def _key_width(keys: Sequence[TableColumn], width: int, widest: int) -> int:
    """Return the largest width of a key column that leaves room for the widest other column."""
    limit = max((column.width for column in keys), default=0)
    while limit > 8 and 1 + sum(min(column.width, limit) + _FRAME for column in keys) + widest + _FRAME > width:
        limit -= 1
    return limit


def _table(
    keys: Sequence[TableColumn],
    columns: Sequence[TableColumn],
    title: str,
    sections: Sequence[int],
    key_width: int,
    framed: bool,
    break_heads: bool = True,
) -> Table:
    from rich.table import Table

    if framed:
        table = Table(title=title or None, title_justify="left", header_style="bold")
    else:
        table = Table(title=title or None, title_justify="left", box=None, pad_edge=False, header_style="dim")
    for column in keys:
        table.add_column(
            column.head_lines if break_heads else column.head,
            justify=column.justify,
            max_width=key_width,
            overflow="fold",
        )
    for column in columns:
        table.add_column(column.head_lines if break_heads else column.head, justify=column.justify, no_wrap=True)
    shown = [*keys, *columns]
    for row in range(len(shown[0].cells)):
        table.add_row(*(column.cells[row] for column in shown), end_section=row in sections)
    return table


# Terminal output that several commands share.


def console() -> Console:
    """Return a console for standard output, as wide as the terminal; without one, 80 columns or COLUMNS."""
    from rich.console import Console

    class PipedConsole(Console):
        def on_broken_pipe(self) -> None:
            """Leave the closed pipe to main, instead of exiting with 1."""
            raise BrokenPipeError

    return PipedConsole()


def print_runs(out: Console, runs: Sequence[Run], title: str) -> None:
    """Print the results of runs, with the best value of each load in bold."""
    from rich.text import Text

    from warmroute.lab.report import KEY_COLUMNS, best_of, by_load, columns

    groups = by_load(runs)
    rows = [run for group in groups for run in group]
    shown: list[TableColumn] = []
    for column in columns(runs):
        cells = []
        for group in groups:
            best = best_of(group, column)
            for run in group:
                is_best = best is not None and column.value is not None and column.value(run) == best
                cells.append(Text(column.text(run), style="bold green" if is_best else ""))
        shown.append(TableColumn(column.head, cells, "right" if shown else "left"))
    keys = [column for column in shown if column.head in KEY_COLUMNS]
    others = [column for column in shown if column.head not in KEY_COLUMNS]
    ends = [number for number, run in enumerate(rows) if any(run is group[-1] for group in groups)]
    for table in fit_tables(keys, others, out.width, title, ends):
        out.print(table)


def progress_bar(quiet: bool) -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=quiet,
    )


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


# Calls to a router's admin listener, for the commands that ask a running router.
#
# They find it by, in this order: --admin URL, the [admin] table of --config FILE, the environment variable
# WARMROUTE_ADMIN_URL, the default address.

URL_ENV: Final = "WARMROUTE_ADMIN_URL"
TOKEN_ENV: Final = "WARMROUTE_ADMIN_TOKEN"
TIMEOUT_S: Final = 30.0
LOOPBACK: Final = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "[::1]", "*": "127.0.0.1"}
"""How to reach a listener on all addresses of this machine."""


class AdminAddress(NamedTuple):
    url: str
    origin: str
    """Where the address comes from, for errors."""


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
