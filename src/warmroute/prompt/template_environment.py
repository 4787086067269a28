"""The jinja2 environment that chat templates run in: what transformers gives them, with short cuts.

A sandbox asks on each attribute and each call whether it is safe. For the fields of a plain dict or of a loop and the
methods of a plain string the answer is known, which saves half of the time; tests/prompt_tokens holds the texts equal.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from types import BuiltinMethodType
from typing import Any, Final, NoReturn

from jinja2 import nodes, pass_eval_context
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

_DICT_ATTRIBUTES: Final = frozenset(dir({}))
_STRING_METHODS: Final = frozenset(
    [
        "startswith",
        "endswith",
        "strip",
        "lstrip",
        "rstrip",
        "split",
        "rsplit",
        "splitlines",
        "replace",
        "lower",
        "upper",
        "title",
        "capitalize",
        "find",
        "join",
    ]
)


class WrittenOnce(dict[str, Any]):
    """A dict that is turned into JSON again and again: a tool's definition. Nobody changes it."""

    __slots__ = ("json",)

    def __init__(self, fields: dict[str, Any]) -> None:
        super().__init__(fields)
        self.json = json.dumps(fields, ensure_ascii=False)


class _Generation(Extension):
    """`{% generation %}` marks what the assistant said, for training. Here it only passes its text on."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_pass_on"), [], [], body).set_lineno(line)

    @pass_eval_context
    def _pass_on(self, _context: nodes.EvalContext, caller: Macro) -> str:
        return str(caller())


class ChatEnvironment(ImmutableSandboxedEnvironment):
    def getattr(self, obj: Any, attribute: str) -> Any:
        if type(obj) is dict and attribute not in _DICT_ATTRIBUTES:
            try:
                return obj[attribute]
            except KeyError:
                return self.undefined(obj=obj, name=attribute)
        if type(obj) is str and attribute in _STRING_METHODS:
            return getattr(obj, attribute)
        if (type(obj) is Namespace or type(obj) is LoopContext) and not attribute.startswith("_"):
            try:
                return getattr(obj, attribute)
            except AttributeError:
                return self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)

    def call(self, context: Context, obj: Any, *args: Any, **kwargs: Any) -> Any:
        if type(obj) is BuiltinMethodType and type(obj.__self__) is str and obj.__name__ in _STRING_METHODS:
            kwargs.pop("_loop_vars", None)  # jinja2's own, which its Context.call takes out
            kwargs.pop("_block_vars", None)
            return obj(*args, **kwargs)
        return super().call(context, obj, *args, **kwargs)


def chat_environment(now: Callable[[], datetime], on_time: Callable[[str], None]) -> ChatEnvironment:
    """`on_time` is told each format in which a template asks for the time."""

    def strftime_now(format: str) -> str:
        on_time(format)
        return now().strftime(format)

    environment = ChatEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    if type(value) is WrittenOnce and not ensure_ascii and indent is None and separators is None and not sort_keys:
        return value.json
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
