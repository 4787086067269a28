"""Limits the time and memory of rendering a chat template: a template may come from anybody's model repository.

    loops, macros, blocks      each pass counts as a step; every few steps the thread's CPU time is checked
    +, ~, *, **, %             the size of the result, by the operands; a constant added to a text is not checked
    string methods, filters    widths and replacements, where these can multiply the length of a text
    output                     its length, and the number of values in a list or a dict that is printed

A render beyond a limit raises TemplateTooExpensive.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any, Final

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame, optimizeconst
from jinja2.filters import FILTERS

MAX_CPU_S: Final = 1.0
"""An ordinary conversation takes milliseconds. A thread that renders for longer is taken from other prompts."""
STEPS_PER_CHECK: Final = 128
"""Reading the thread's clock at each step would cost more than the steps."""
PIECES_PER_CHECK: Final = 32
"""Pieces of the output between two checks of its length."""
MAX_LENGTH: Final = 1 << 23
"""Characters of a text, more than any context window holds. To join more, and their tokens, would stop the event loop
for over 10 ms, since that holds the interpreter lock."""
MAX_ITEMS: Final = 1 << 20
"""Items of a list, and values in a list or dict that is converted to text, nested ones included."""
MAX_WIDTH: Final = 10_000
"""Largest width to which a text is padded or indented."""
MAX_INTEGER_BITS: Final = 4096
"""`2 ** 2 ** 40` would take all memory in one step."""
REMOVED_FILTERS: Final = ("pprint", "striptags", "urlize", "wordwrap", "xmlattr")
"""Filters whose time can grow with the square of their input. No known chat template uses them."""
_SEQUENCES: Final = (str, list, tuple)
_CONTAINERS: Final = (dict, list, tuple)
_STEP: Final = "\0step"
_LONG_WIDTH: Final = re.compile(r"[0-9]{5,}")


class TemplateTooExpensive(Exception):
    """Rendering takes too much time or memory."""


class RenderTime(threading.local):
    """The CPU time of the render that runs in this thread."""

    started_s: float | None = None
    """CPU time of the thread at the first check of this render."""

    def check(self) -> None:
        now_s = time.thread_time()
        if self.started_s is None:
            self.started_s = now_s
        elif now_s - self.started_s > MAX_CPU_S:
            raise TemplateTooExpensive(f"it takes more than {MAX_CPU_S:g} s of CPU time")


def check_length(length: int) -> None:
    if length > MAX_LENGTH:
        raise TemplateTooExpensive(f"it makes a text of more than {MAX_LENGTH:,} characters")


def _check_size(sequence: Any, length: int) -> None:
    """Check a length that a text or a list would have."""
    if isinstance(sequence, str):
        check_length(length)
    elif length > MAX_ITEMS:
        raise TemplateTooExpensive(f"it makes a list of more than {MAX_ITEMS:,} items")


def check_width(width: Any) -> None:
    if isinstance(width, int) and abs(width) > MAX_WIDTH:
        raise TemplateTooExpensive(f"it pads a text to more than {MAX_WIDTH:,} characters")


def check_printed(value: Any) -> None:
    """Check a value that is converted to text. Lists that contain a list twice are printed twice, and so on."""
    left, pending = MAX_ITEMS, [value]
    while pending:
        one = pending.pop()
        items = one.values() if isinstance(one, dict) else one if isinstance(one, _CONTAINERS) else ()
        left -= 1 + len(items)
        if left < 0:
            raise TemplateTooExpensive(f"it prints a list or dict of more than {MAX_ITEMS:,} values")
        pending.extend(item for item in items if isinstance(item, _CONTAINERS))


def _check_format(text: Any, values: Iterable[Any]) -> None:
    """Check the widths in a format: those in its text, and the values, if some may be widths."""
    text = str(text)
    if _LONG_WIDTH.search(text):
        raise TemplateTooExpensive(f"it pads a text to more than {MAX_WIDTH:,} characters")
    is_width_given = "*" in text or "{" in text.partition(":")[2]
    for value in values:
        if is_width_given:
            check_width(value)
        check_printed(value)


# Operators.


def to_text(value: Any) -> str:
    """Return a value as text: what is printed, and the operands of `~`."""
    if isinstance(value, _CONTAINERS):
        check_printed(value)
    return str(value)


def add(left: Any, right: Any) -> Any:
    if isinstance(left, _SEQUENCES) and isinstance(right, _SEQUENCES):
        _check_size(left, len(left) + len(right))
    return left + right


def join_texts(values: Iterable[Any]) -> str:
    """Apply the operator `~`."""
    return concat([to_text(value) for value in values])


def concat(pieces: Iterable[str]) -> str:
    """Join the output of a template, a macro or a block."""
    if type(pieces) is list:
        check_length(sum(map(len, pieces)))
        return "".join(pieces)
    length, found, pieces = 0, list[str](), iter(pieces)
    while some := list(islice(pieces, PIECES_PER_CHECK)):
        length += sum(map(len, some))
        check_length(length)
        found += some
    return "".join(found)


def _multiply(left: Any, right: Any) -> Any:
    for sequence, factor in ((left, right), (right, left)):
        if isinstance(factor, int) and isinstance(sequence, str | bytes | list | tuple):
            _check_size(sequence, len(sequence) * max(0, factor))
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() + right.bit_length())
    return left * right


def _power(left: Any, right: Any) -> Any:
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() * abs(right))
    return left**right


def _check_bits(bits: int) -> None:
    if bits > MAX_INTEGER_BITS:
        raise TemplateTooExpensive(f"it computes with integers of more than {MAX_INTEGER_BITS:,} bits")


def _modulo(left: Any, right: Any) -> Any:
    if isinstance(left, str | bytes):
        _check_format(left, right if isinstance(right, tuple) else (right,))
    return left % right


OPERATORS: Final[dict[str, Callable[[Any, Any], Any]]] = {"*": _multiply, "**": _power, "%": _modulo}


# Methods.


def check_method_call(owner: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Check a call of a method that can return much more than it was given."""
    if name == "replace" and len(args) >= 2:
        _check_replaced(owner, *args[:2])
    elif name == "join" and args:
        _check_join(args[0], owner)
    elif name == "expandtabs":
        width = args[0] if args else kwargs.get("tabsize", 8)
        check_width(width)
        check_length(len(owner) + _count(owner, "\t") * width if isinstance(width, int) else 0)
    elif name in ("center", "ljust", "rjust", "zfill", "to_bytes"):
        for width in (*args, *kwargs.values()):
            check_width(width)
    elif name in ("format", "format_map"):
        values = args[0].values() if name == "format_map" and args and isinstance(args[0], dict) else args
        _check_format(owner, (*values, *kwargs.values()))


def _count(text: Any, part: Any) -> int:
    return text.count(part) if isinstance(text, str) and isinstance(part, str) else len(text)


def _check_replaced(text: Any, old: Any, new: Any) -> None:
    if len(new) > len(old):
        check_length(len(text) + _count(text, old) * len(new))


# Filters.


def limited_filters() -> dict[str, Callable[..., Any]]:
    """Return jinja2's filters, with checks for those that can multiply the length of a text."""
    filters = {name: filter for name, filter in FILTERS.items() if name not in REMOVED_FILTERS}
    return filters | {name: _checked(filters[name], check) for name, check in _FILTER_CHECKS.items()}


def _checked(filter: Callable[..., Any], check: Callable[..., None]) -> Callable[..., Any]:
    passed = getattr(filter, "jinja_pass_arg", None)  # jinja2 passes its environment or context first
    first = 0 if passed is None else 1

    def limited(*args: Any, **kwargs: Any) -> Any:
        check(*args[first:], **kwargs)
        return filter(*args, **kwargs)

    if passed is not None:
        limited.jinja_pass_arg = passed  # type: ignore[attr-defined]
    return limited


def _check_indent(s: Any, width: Any = 4, first: bool = False, blank: bool = False) -> None:
    size = len(width) if isinstance(width, str) else width
    check_width(size)
    check_length((1 + str(s).count("\n")) * size if isinstance(size, int) else 0)


def _check_replace(s: Any, old: Any, new: Any, count: Any = None) -> None:
    _check_replaced(str(s), str(old), str(new))


def _check_join(value: Any, d: Any = "", attribute: Any = None) -> None:
    if isinstance(value, list | tuple):
        check_length(len(value) * len(d) + sum(len(one) for one in value if isinstance(one, str)))
        check_printed([one for one in value if not isinstance(one, str)])


def _check_sum(iterable: Any, attribute: Any = None, start: Any = 0) -> None:
    if not isinstance(start, int | float):
        raise TemplateTooExpensive("it adds up something else than numbers")


_FILTER_CHECKS: Final[dict[str, Callable[..., None]]] = {
    "batch": lambda value, linecount, fill_with=None: check_width(linecount),
    "center": lambda value, width=80: check_width(width),
    "format": lambda value, *args, **kwargs: _check_format(value, (*args, *kwargs.values())),
    "indent": _check_indent,
    "join": _check_join,
    "replace": _check_replace,
    "round": lambda value, precision=0, method="common": check_width(precision),
    "slice": lambda value, slices, fill_with=None: check_width(slices),
    "string": check_printed,
    "sum": _check_sum,
}


# Compilation.


class LimitedCodeGenerator(CodeGenerator):
    """Compiles templates to code that counts steps, and checks the results of +, ~ and what is printed."""

    def visit_Template(self, node: nodes.Template, frame: Frame | None = None) -> None:
        for part in list(node.find_all((nodes.For, nodes.Macro, nodes.CallBlock, nodes.Block))):
            step = nodes.ExprStmt(nodes.Const(_STEP))
            part.body.insert(0, step.set_lineno(part.lineno))  # type: ignore[attr-defined]
        super().visit_Template(node, frame)

    def visit_ExprStmt(self, node: nodes.ExprStmt, frame: Frame) -> None:
        if isinstance(node.node, nodes.Const) and node.node.value is _STEP:
            self.writeline("environment.steps_left -= 1", node)
            self.writeline("if environment.steps_left < 0: environment.check_time()")
        else:
            super().visit_ExprStmt(node, frame)

    @optimizeconst
    def visit_Add(self, node: nodes.BinExpr, frame: Frame) -> None:
        if isinstance(node.left, nodes.Const) or isinstance(node.right, nodes.Const):
            super().visit_Add(node, frame)
            return
        self.write("environment.add(")
        self.visit(node.left, frame)
        self.write(", ")
        self.visit(node.right, frame)
        self.write(")")

    @optimizeconst
    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.join_texts((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def _output_child_pre(self, node: nodes.Expr, frame: Frame, finalize: Any) -> None:
        if frame.eval_ctx.volatile or frame.eval_ctx.autoescape:
            self.fail("autoescape is not available in chat templates", node.lineno)
        self.write("(_printed if type(_printed := (")

    def _output_child_post(self, node: nodes.Expr, frame: Frame, finalize: Any) -> None:
        self.write(")) is str else environment.to_text(_printed))")
