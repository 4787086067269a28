"""Types of command-line arguments: numbers within bounds, and files that a command will write. Their errors say what
was expected. A command checks its arguments before it starts to work."""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, NoReturn

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
