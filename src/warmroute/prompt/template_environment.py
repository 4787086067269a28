"""The jinja2 sandbox that chat templates run in, as transformers sets it up, with shortcuts.

A sandbox checks each attribute and each call for safety. Fields of a plain dict or a loop and methods of a plain string
are known to be safe; skipping their checks halves the rendering time. template_limits.py limits time and memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from types import BuiltinMethodType, MethodType
from typing import Any, Final, NoReturn

from jinja2 import nodes, pass_eval_context
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from warmroute.prompt import template_limits

_DICT_ATTRIBUTES: Final = frozenset(dir({}))
_STRING_METHODS: Final = frozenset((
    "startswith", "endswith", "strip", "lstrip", "rstrip", "split", "rsplit", "splitlines", "replace", "lower", "upper",
    "title", "capitalize", "find", "join",
))  # fmt: skip


_MULTIPLYING_METHODS: Final = frozenset(("replace", "join"))
_METHODS: Final = (BuiltinMethodType, MethodType)
_PLAIN_VALUES: Final = (str, bytes, int)


class CachedJsonDict(dict[str, Any]):
    """A dict that caches its JSON text: a tool's definition, which every request renders. It must not be changed."""

    __slots__ = ("json",)

    def __init__(self, fields: dict[str, Any]) -> None:
        super().__init__(fields)
        self.json = json.dumps(fields, ensure_ascii=False)


class _Generation(Extension):
    """`{% generation %}` marks the assistant's text for training. Here it prints the text unchanged."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_print_body"), [], [], body).set_lineno(line)

    @pass_eval_context
    def _print_body(self, _context: nodes.EvalContext, caller: Macro) -> str:
        return str(caller())


class ChatEnvironment(ImmutableSandboxedEnvironment):
    code_generator_class = template_limits.LimitedCodeGenerator
    intercepted_binops = frozenset(template_limits.OPERATORS)
    concat = staticmethod(template_limits.concat)
    add = staticmethod(template_limits.add)
    join_texts = staticmethod(template_limits.join_texts)
    to_text = staticmethod(template_limits.to_text)

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.filters = template_limits.limited_filters()
        del self.globals["lipsum"]
        self.render_time = template_limits.RenderTime()
        self.steps_left = 0
        """Steps until the next check of the time. Renders in several threads share it."""

    def check_time(self) -> None:
        self.steps_left = template_limits.STEPS_PER_CHECK
        self.render_time.check()

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        return template_limits.OPERATORS[operator](left, right)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Return the sandboxed form of str.format, which loses its owner."""
        format = super().wrap_str_format(value)
        if format is None:
            return None

        def limited(*args: Any, **kwargs: Any) -> str:
            template_limits.check_method_call(value.__self__, value.__name__, args, kwargs)
            return format(*args, **kwargs)

        return limited

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
            kwargs.pop("_loop_vars", None)  # jinja2 adds these two, and its Context.call removes them
            kwargs.pop("_block_vars", None)
            if obj.__name__ in _MULTIPLYING_METHODS:
                template_limits.check_method_call(obj.__self__, obj.__name__, args, kwargs)
            return obj(*args, **kwargs)
        if isinstance(obj, _METHODS) and isinstance(obj.__self__, _PLAIN_VALUES):
            template_limits.check_method_call(obj.__self__, obj.__name__, args, kwargs)
        return super().call(context, obj, *args, **kwargs)


def chat_environment(now: Callable[[], datetime], on_time_format: Callable[[str], None]) -> ChatEnvironment:
    """`on_time_format` is called with each format in which a template prints the time."""

    def strftime_now(format: str) -> str:
        on_time_format(format)
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
    if type(value) is CachedJsonDict and not ensure_ascii and indent is None and separators is None and not sort_keys:
        return value.json
    template_limits.check_width(indent)
    for separator in separators or ():
        template_limits.check_width(len(separator))
    template_limits.check_printed(value)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
