"""warmroute capture: writes traffic as a trace for replay and plan, from a running router or from a mirror."""

from __future__ import annotations

import argparse
import asyncio
import gzip
import signal
import time
from collections.abc import Iterator
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from warmroute.app.commands import add_admin_options, call_admin, number, open_admin, output_file, port, whole
from warmroute.config import Config, ConfigError

if TYPE_CHECKING:
    from warmroute.app.capture import Sink
    from warmroute.app.mirror import Mirror


EPILOG = """\
From a running router (its admin listener), until Ctrl-C or for some minutes:
    warmroute capture --out trace.jsonl.gz --minutes 30
From a mirror in front of other servers, which sends copies of the requests to this port:
    warmroute capture --listen 9090 --tokenizer my-model=/models/my-model --out trace.jsonl.gz
A capture has hashes of prompts under a random key that is not stored, lengths and times; no text.
"""
MAX_MB = 1024


def add_to(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "capture",
        help="write live or mirrored traffic as a trace for replay and plan, without its text",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=output_file, metavar="FILE", help="trace to write, .jsonl or .jsonl.gz")
    parser.add_argument(
        "--minutes", type=number(above=0), metavar="N", help="stop after N minutes (default: at Ctrl-C)"
    )
    parser.add_argument(
        "--max-mb", type=whole(1, 1_000_000), default=MAX_MB, metavar="N", help=f"stop at N MB (default: {MAX_MB})"
    )
    add_admin_options(parser, with_config=False)
    parser.add_argument("--status", action="store_true", help="print what the running router captures now, and exit")
    mirror = parser.add_argument_group("mirrored traffic")
    mirror.add_argument("--listen", type=port, metavar="PORT", help="take mirrored requests on this port")
    mirror.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    mirror.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="configuration: [[models]], [[keys]], [prompts], [limits], [capture]; without --listen, that of the "
        "router, which names its admin listener",
    )
    mirror.add_argument(
        "--tokenizer",
        action="append",
        default=[],
        metavar="MODEL=PATH",
        help="directory with a model's tokenizer files; repeatable (default: prompts are matched by their text)",
    )
    mirror.add_argument(
        "--output-tokens", type=whole(1, 1_000_000), metavar="N", help="length of an answer (default: learned)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.status:
        return _print_status(args)
    if args.listen is None:
        given = [name for name in ("tokenizer", "output_tokens") if getattr(args, name)]
        if given:
            raise ConfigError(f"capture: --{given[0].replace('_', '-')} needs --listen PORT")
        if args.out is None:
            raise ConfigError("capture: give the file to write with --out FILE")
        return _capture_router(args)
    return _capture_mirror(args)


def _print_status(args: argparse.Namespace) -> int:
    captures = call_admin(args, "/admin/capture", expect="captures")["captures"]
    if not captures:
        print("The router captures nothing. Set directory in [capture], or use `warmroute capture --out FILE`.")
    for one in captures:
        state = ", cannot write now" if one["failing"] else ""
        print(
            f"{one['to']}: {one['requests']:,} requests, {one['bytes'] / 1e6:,.1f} MB in {one['seconds']:,.0f} s, "
            f"{one['dropped']:,} dropped{state}"
        )
    return 0


# From a running router.


def _capture_router(args: argparse.Namespace) -> int:
    out: Path = args.out
    trace = _TraceOutput(out, args.max_mb * 1_000_000)
    ends_s = time.monotonic() + 60.0 * args.minutes if args.minutes else float("inf")
    why = "the router closed the connection"
    try:
        with open_admin(args, "/admin/capture/stream") as response, trace:
            for line in _lines_of(response):
                if line != b"\n":
                    trace.write(line)
                if trace.is_full:
                    why = f"the trace has {args.max_mb} MB before compression"
                    break
                if time.monotonic() >= ends_s:
                    why = f"{args.minutes:g} minutes are over"
                    break
    except KeyboardInterrupt:
        why = "interrupted"
    _conclude(out, trace.requests, why)
    return 0


def _lines_of(response: HTTPResponse) -> Iterator[bytes]:
    """Return the lines until the router ends the response, in whatever way."""
    try:
        yield from response
    except (OSError, HTTPException):
        return


class _TraceOutput:
    """The file that a trace is written to. Errors become ConfigErrors."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._written = 0
        self.requests = 0

    def __enter__(self) -> None:
        try:
            self._file = gzip.open(self._path, "wb", 6) if self._path.suffix == ".gz" else self._path.open("wb")
        except OSError as error:
            raise ConfigError(f"cannot write {self._path}: {error.strerror}") from None

    def __exit__(self, *_error: object) -> None:
        try:
            self._file.close()
        except OSError as error:
            raise ConfigError(f"cannot write {self._path}: {error.strerror}") from None

    def write(self, line: bytes) -> None:
        try:
            self._file.write(line)
        except OSError as error:
            raise ConfigError(f"cannot write {self._path}: {error.strerror}") from None
        self.requests += 1
        self._written += len(line)

    @property
    def is_full(self) -> bool:
        return self._written >= self._max_bytes


def _conclude(out: Path | str, requests: int, why: str) -> None:
    print(f"{requests:,} requests in {out} ({why}).")
    if requests:
        print(f"Next: warmroute replay {out} --nodes N --profile GPU-AND-MODEL; warmroute plan {out}")


# From a mirror.


def _capture_mirror(args: argparse.Namespace) -> int:
    import uvloop

    from warmroute.app import log as logs
    from warmroute.app.capture import CaptureDirectory, CaptureFile
    from warmroute.app.mirror import Mirror

    config = _read_config(args)
    logs.set_up(config.log)
    settings = config.capture
    sink: Sink
    if args.out is not None:
        args.out.unlink(missing_ok=True)
        sink = CaptureFile(args.out, args.max_mb * 1_000_000)
    elif settings.directory:
        sink = CaptureDirectory(Path(settings.directory), settings.file_max_bytes, settings.max_files, time.time())
    else:
        raise ConfigError("capture: give the file to write with --out FILE, or directory in [capture]")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        mirror = runner.run(_run_mirror(args, config, sink))
    assert isinstance(mirror, Mirror)
    skipped = ", ".join(f"{count:,} × {code}" for code, count in mirror.unreadable.most_common())
    if skipped:
        print(f"Left out of {mirror.received:,} requests: {skipped}.")
    if mirror.counters.capture_dropped:
        print(f"Dropped: {mirror.counters.capture_dropped:,} requests.")
    _conclude(args.out or settings.directory, mirror.counters.capture_written, "stopped")
    return 0


def _read_config(args: argparse.Namespace) -> Config:
    import msgspec

    from warmroute import config as configuration
    from warmroute.config import ModelConfig

    config = configuration.load(args.config) if args.config else Config()
    models = {model.name: model for model in config.models}
    for text in args.tokenizer:
        name, equals, path = text.partition("=")
        if not equals or not name or not path:
            raise ConfigError(f"--tokenizer {text!r}: expected MODEL=PATH, such as my-model=/models/my-model")
        models[name] = ModelConfig(name=name, tokenizer=path)
    return msgspec.structs.replace(config, models=tuple(models.values()))


async def _run_mirror(args: argparse.Namespace, config: Config, sink: Sink) -> Mirror:
    from warmroute.app.mirror import Mirror

    mirror = Mirror(config, args.output_tokens)
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number_ in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number_, stopped.set)
    try:
        await mirror.start(args.host, args.listen, sink)
        async with asyncio.timeout(60.0 * args.minutes if args.minutes else None):
            await stopped.wait()
    except TimeoutError:
        pass
    finally:
        await mirror.close()
    return mirror
