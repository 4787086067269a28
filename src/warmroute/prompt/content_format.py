"""What a chat template expects in a message's `content`: one string, or a list of parts.

vLLM reads it off the template's syntax tree, and so does this: a template that loops over a message's content takes
parts ("openai"), any other takes a string ("string").
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Literal

from jinja2 import nodes

ContentFormat = Literal["string", "openai"]
_CONTENT: Final = "content"


def content_format(tree: nodes.Template) -> ContentFormat:
    """Raises whatever the tree's oddities raise; vLLM then takes "string"."""
    return "openai" if next(_loops_over_content(tree), None) is not None else "string"


def _is_name(node: nodes.Node, name: str) -> bool:
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name


def _is_field(node: nodes.Node, name: str, field: str) -> bool:
    if isinstance(node, nodes.Getitem):
        return _is_name(node.node, name) and isinstance(node.arg, nodes.Const) and node.arg.value == field
    return isinstance(node, nodes.Getattr) and _is_name(node.node, name) and node.attr == field


def _is_or_is_made_of(node: nodes.Node, name: str, field: str = "") -> bool:
    """The variable (or its field) itself, filtered, tested or sliced."""
    if isinstance(node, nodes.Filter):
        return node.node is not None and _is_or_is_made_of(node.node, name, field)
    if isinstance(node, nodes.Test):
        return _is_or_is_made_of(node.node, name, field)
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
        return _is_or_is_made_of(node.node, name, field)
    return _is_field(node, name, field) if field else _is_name(node, name)


def _message_lists(tree: nodes.Template) -> list[str]:
    """`messages` and the variables that are set from it."""
    found, at = ["messages"], 0
    while at < len(found):
        for assign in tree.find_all(nodes.Assign):
            if _is_or_is_made_of(assign.node, found[at]):
                target = _target(assign.target)
                if target != found[at] and target not in found:
                    found.append(target)
        at += 1
    return found


def _messages(tree: nodes.Template) -> list[str]:
    """The variables of loops over messages."""
    lists = _message_lists(tree)
    return [
        _target(loop.target)
        for loop in tree.find_all(nodes.For)
        if any(_is_or_is_made_of(loop.iter, name) for name in lists)
    ]


def _loops_over_content(tree: nodes.Template) -> Iterator[str]:
    messages = _messages(tree)
    in_macros: dict[int, set[str]] = {}
    for macro in tree.find_all(nodes.Macro):
        given_content = _parameters_given_content(tree, macro, messages)
        for loop in macro.find_all(nodes.For):
            in_macros.setdefault(id(loop), set())
            if given_content:
                in_macros[id(loop)] = given_content
    for loop in tree.find_all(nodes.For):
        over = loop.iter
        if any(_is_or_is_made_of(over, message, _CONTENT) for message in messages):
            yield _target(loop.target)
        elif isinstance(over, nodes.Name):
            parameters = in_macros.get(id(loop))
            if over.name in parameters if parameters is not None else over.name == _CONTENT:
                yield _target(loop.target)


def _parameters_given_content(tree: nodes.Template, macro: nodes.Macro, messages: list[str]) -> set[str]:
    names = [parameter.name for parameter in macro.args]
    given: set[str] = set()
    for call in tree.find_all(nodes.Call):
        if not (isinstance(call.node, nodes.Name) and call.node.name == macro.name):
            continue
        pairs = [*zip(names, call.args, strict=False), *((word.key, word.value) for word in call.kwargs)]
        for name, value in pairs:
            if name in names and any(_is_or_is_made_of(value, message, _CONTENT) for message in messages):
                given.add(name)
    return given


def _target(node: nodes.Node) -> str:
    if not isinstance(node, nodes.Name):
        raise ValueError("a loop or an assignment with several targets")
    return node.name
