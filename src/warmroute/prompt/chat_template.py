"""Renders a chat template as engines do, and finds out which form of content it expects."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from types import BuiltinMethodType, MethodType
from typing import Any, Final, Literal, NoReturn

from jinja2 import meta, nodes, pass_eval_context
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from warmroute.prompt import template_limits
from warmroute.prompt.template_limits import TemplateTooExpensive

# Find out what a chat template expects as a message's `content`: a string, or a list of parts.
#
# This follows vLLM, which looks at the template's syntax tree: a template that loops over a message's content expects
# parts ("openai"), any other expects a string ("string").

ContentFormat = Literal["string", "openai"]
_CONTENT: Final = "content"


def content_format(tree: nodes.Template) -> ContentFormat:
    """May raise any exception for an unusual tree; vLLM then assumes "string"."""
    return "openai" if next(_loops_over_content(tree), None) is not None else "string"


def _is_name(node: nodes.Node, name: str) -> bool:
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name


def _is_field(node: nodes.Node, name: str, field: str) -> bool:
    if isinstance(node, nodes.Getitem):
        return _is_name(node.node, name) and isinstance(node.arg, nodes.Const) and node.arg.value == field
    return isinstance(node, nodes.Getattr) and _is_name(node.node, name) and node.attr == field


def _derives_from(node: nodes.Node, name: str, field: str = "") -> bool:
    """Return whether the node is the variable (or its field), possibly filtered, tested or sliced."""
    if isinstance(node, nodes.Filter):
        return node.node is not None and _derives_from(node.node, name, field)
    if isinstance(node, nodes.Test):
        return _derives_from(node.node, name, field)
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
        return _derives_from(node.node, name, field)
    return _is_field(node, name, field) if field else _is_name(node, name)


def _message_lists(tree: nodes.Template) -> list[str]:
    """Return `messages` and the variables that are set from it."""
    found = ["messages"]
    # Templates rename the list before they loop: `{% set loop_messages = messages[1:] %}`.
    for name in found:  # which grows meanwhile
        for assign in tree.find_all(nodes.Assign):
            if _derives_from(assign.node, name) and (target := _target(assign.target)) not in found:
                found.append(target)
    return found


def _loop_variables(tree: nodes.Template) -> list[str]:
    lists = _message_lists(tree)
    return [
        _target(loop.target)
        for loop in tree.find_all(nodes.For)
        if any(_derives_from(loop.iter, name) for name in lists)
    ]


def _loops_over_content(tree: nodes.Template) -> Iterator[str]:
    messages = _loop_variables(tree)
    in_macros: dict[int, set[str]] = {}
    for macro in tree.find_all(nodes.Macro):
        with_content = _parameters_with_content(tree, macro, messages)
        for loop in macro.find_all(nodes.For):
            in_macros.setdefault(id(loop), set())
            if with_content:
                in_macros[id(loop)] = with_content
    for loop in tree.find_all(nodes.For):
        over = loop.iter
        if any(_derives_from(over, message, _CONTENT) for message in messages):
            yield _target(loop.target)
        elif isinstance(over, nodes.Name):
            parameters = in_macros.get(id(loop))
            if over.name in parameters if parameters is not None else over.name == _CONTENT:
                yield _target(loop.target)


def _parameters_with_content(tree: nodes.Template, macro: nodes.Macro, messages: list[str]) -> set[str]:
    names = [parameter.name for parameter in macro.args]
    found: set[str] = set()
    for call in tree.find_all(nodes.Call):
        if not (isinstance(call.node, nodes.Name) and call.node.name == macro.name):
            continue
        pairs = [*zip(names, call.args, strict=False), *((word.key, word.value) for word in call.kwargs)]
        for name, value in pairs:
            if name in names and any(_derives_from(value, message, _CONTENT) for message in messages):
                found.add(name)
    return found


def _target(node: nodes.Node) -> str:
    if not isinstance(node, nodes.Name):
        raise ValueError("the loop or assignment has several targets")
    return node.name


# The jinja2 sandbox that chat templates run in, as transformers sets it up, with shortcuts.
#
# A sandbox checks each attribute and each call for safety. Fields of a plain dict or a loop and methods of a plain
# string are known to be safe; skipping their checks halves the rendering time. template_limits.py limits time and
# memory.

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
        # jinja2's generator of random text: the engine would have another text each time.
        del self.globals["lipsum"]
        self.render_time = template_limits.RenderTime()
        self.steps_left = 0
        """Steps until the next check of the time. Renders in several threads share it, so a check may come early or
        late."""

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
            # A plain string's method needs no sandbox. The shortcut skips Context.call, and so what that would do.
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


# A model's chat template: renders a conversation to the text that the engine tokenizes, as transformers does.

Message = dict[str, Any]
MAX_SOURCE_LENGTH: Final = 1 << 18
"""Longer sources are refused before they are compiled."""
MAX_ORDINARY_MESSAGES: Final = 256
"""A conversation of at most this many messages, and of MAX_ORDINARY_LENGTH characters, is ordinary."""
MAX_ORDINARY_LENGTH: Final = 1 << 16
"""Characters of a conversation, where any other value counts as four. A longer one from a client may exceed the limits
of rendering: that must not disable the template for others."""
_CONTINUE_MARK: Final = "CONTINUE_FINAL_MESSAGE_TAG "
_TIME_FIELD: Final = re.compile("%[-_0^#]?(.)")
_FINER_THAN_A_DAY: Final = frozenset("HIMSfpXcTRrsZzk+l")
_LONG_LITERAL: Final = 3
"""Shorter strings that a template searches for occur in any text, and change nothing."""
_ROLES: Final = frozenset(("system", "user", "assistant", "tool", "developer"))
_SEARCHING_NODES: Final = (nodes.Compare, nodes.Call, nodes.Test, nodes.Filter)


class TemplateRejected(Exception):
    """The template refuses this conversation, or fails. An engine answers such a request with status 400."""


class ChatTemplate:
    """A compiled template. Thread-safe. Raises TemplateRejected if the source is not a valid template."""

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], now: Callable[[], datetime] = datetime.now
    ) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens)
        self._now = now
        self._time_formats: tuple[str, ...] = ()
        self._environment = environment = chat_environment(now, self._note_time_format)
        self.disabled_reason = ""
        """Why the template is no longer used: rendering an ordinary conversation took too much time or memory."""
        if len(source) > MAX_SOURCE_LENGTH:
            raise TemplateRejected(f"not a template: longer than {MAX_SOURCE_LENGTH:,} characters")
        try:
            self._template = environment.from_string(source)
            tree = environment.parse(source)
        except (TemplateError, TemplateTooExpensive) as error:
            raise TemplateRejected(f"not a template: {error}") from error
        except Exception as error:  # such as RecursionError, or SyntaxError: too many nested loops
            raise TemplateRejected(f"not a template: {type(error).__name__}") from error
        self.variables = frozenset(meta.find_undeclared_variables(tree))
        self.supports_developer_role = '"developer"' in source or "'developer'" in source
        self.literals = _literals(tree)
        """Strings that the template may search for in messages."""
        self.long_literals = tuple(text for text in self.literals if len(text) >= _LONG_LITERAL and text not in _ROLES)
        try:
            self.content_format: ContentFormat = content_format(tree)
        except Exception:
            self.content_format = "string"

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Raises TemplateRejected."""
        if self.disabled_reason:
            raise TemplateRejected(self.disabled_reason)
        self._environment.render_time.started_s = None
        # Templates call `bos_token` and the others by name.
        all_variables = {**self._special_tokens, **variables} if variables else self._special_tokens
        try:
            return self._template.render(
                messages=messages,
                tools=tools,
                documents=documents,
                add_generation_prompt=add_generation_prompt,
                **all_variables,
            )
        except (TemplateTooExpensive, MemoryError) as error:
            if _is_ordinary(messages, tools, documents, variables):
                # A long conversation from a client may exceed the limits. Only an ordinary one that does shows that the
                # template is at fault.
                self.disabled_reason = str(error) or "it takes too much memory"
            raise TemplateRejected(f"{error}") from error
        except Exception as error:  # a template can raise anything
            raise TemplateRejected(f"{type(error).__name__}") from error

    def render_continued(self, messages: Sequence[Message], field: str = "content", **options: Any) -> str:
        """Render with the last message unfinished, for `continue_final_message`. Raises TemplateRejected."""
        # As transformers does: a mark behind the last message shows where the rendered text has to end.
        marked = copy.deepcopy(list(messages))
        last = marked[-1].get(field)
        if last is None or field not in self.source:
            raise TemplateRejected("the last message has nothing to continue")
        if isinstance(last, list):
            part = next((part for part in reversed(last) if isinstance(part, dict) and "text" in part), None)
            if part is None:
                raise TemplateRejected("the last message has no text to continue")
            last, part["text"] = part["text"], part["text"] + _CONTINUE_MARK
        else:
            marked[-1][field] = last + _CONTINUE_MARK
        text = self.render(marked, add_generation_prompt=False, **options)
        if last.strip() not in text or _CONTINUE_MARK.strip() not in text:
            raise TemplateRejected("the template changes the message to continue")
        at = text.rindex(_CONTINUE_MARK.strip())
        return text[:at] if text.startswith(_CONTINUE_MARK, at) else text[:at].rstrip()

    # ---- Time ----

    def _note_time_format(self, format: str) -> None:
        if format not in self._time_formats:
            self._time_formats = (*self._time_formats, format)

    def time_key(self) -> str:
        """Return what the template prints of the current time; a text rendered under another key may differ."""
        if not self._time_formats:
            return ""
        now = self._now()
        return "\0".join(now.strftime(format) for format in self._time_formats)

    def prints_time_of_day(self) -> bool:
        """Return whether the text changes within a day, so that the engine may render another text."""
        return any(field in _FINER_THAN_A_DAY for format in self._time_formats for field in _TIME_FIELD.findall(format))


def _is_ordinary(messages: Sequence[Message], *others: Any) -> bool:
    """Return whether a conversation is so short that a template must be able to render it."""
    left, pending = MAX_ORDINARY_LENGTH, [messages, *others]
    while pending and left >= 0:
        value = pending.pop()
        left -= len(value) if isinstance(value, str) else 4
        if isinstance(value, Mapping):
            pending += [*value, *value.values()]
        elif isinstance(value, list | tuple):
            pending += value
    return left >= 0 and len(messages) <= MAX_ORDINARY_MESSAGES


def _literals(tree: nodes.Template) -> tuple[str, ...]:
    keys = {id(item.arg) for item in tree.find_all(nodes.Getitem)}
    found: dict[str, None] = {}
    for node in tree.find_all(_SEARCHING_NODES):
        for constant in node.find_all(nodes.Const):
            if isinstance(constant.value, str) and constant.value and id(constant) not in keys:
                found[constant.value] = None
    return tuple(found)
