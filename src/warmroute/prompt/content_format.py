"""Find out what a chat template expects as a message's `content`: a string, or a list of parts.

This follows vLLM, which looks at the template's syntax tree: a template that loops over a message's content expects
parts ("openai"), any other expects a string ("string").
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Literal

from jinja2 import nodes

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
