"""No regular expression of the router needs time that grows faster than the text that it is applied to.

Python's regular expressions backtrack: two repeats that match the same characters, one after the other or one in the
other, take time that grows with the square of the text, or without bound. The test derives texts of 64 KiB from each
pattern that can make it do so: what the pattern matches before a repeat, then one character or one round of the repeat
many times, then something that does not match.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from functools import cache
from re import _constants as op  # type: ignore[attr-defined]
from re import _parser  # type: ignore[attr-defined]
from typing import Any, NamedTuple

import pytest
from support.cpu_limit import TooSlow, cpu_limit

import warmroute

LENGTH = 64 << 10
CPU_S = 1.0
"""A pattern without backtracking takes a few milliseconds; one whose time grows with the square takes minutes."""
OPERATORS_OWN = ("app.commands", "app.monitoring", "lab.demo", "lab.html_report")
"""Modules whose texts come from the operator's own machine."""
CHARACTERS = " \ta0;,\\\"/.-=:{[('%"
MAX_SAMPLES = 24
MAX_TEXTS = 80


class Use(NamedTuple):
    pattern: re.Pattern[Any]
    searches: bool
    """Whether the code searches with it, so that it is tried from every character of a text."""

    def apply(self, text: str, cpu_s: float = CPU_S) -> None:
        given: Any = text.encode("latin-1", "replace") if isinstance(self.pattern.pattern, bytes) else text
        with cpu_limit(cpu_s):
            self.pattern.fullmatch(given)
            self.pattern.match(given)
            for _ in self.pattern.finditer(given) if self.searches else ():
                pass


def find_uses() -> dict[str, Use]:
    found: dict[str, Use] = {}
    for module in pkgutil.walk_packages(warmroute.__path__, "warmroute."):
        name = module.name.removeprefix("warmroute.")
        if name.startswith(OPERATORS_OWN) or name.endswith("__main__"):
            continue
        imported = importlib.import_module(module.name)
        for name, value in vars(imported).items():
            if isinstance(value, re.Pattern):
                used = rf"\b{name}\.(?!match|fullmatch|pattern)"
                searches = re.search(used, inspect.getsource(imported)) is not None
                found[f"{module.name.removeprefix('warmroute.')}.{name}"] = Use(value, searches)
    return found


@cache
def character_matches(kind: Any, argument: Any, character: str) -> bool:
    pattern = _parser.SubPattern(_parser.State(), [(kind, list(argument) if kind is op.IN else argument)])
    return re._compiler.compile(pattern).fullmatch(character) is not None  # type: ignore[attr-defined]


def characters_of(kind: Any, argument: Any) -> list[str]:
    """Some characters that one item of a pattern matches."""
    if kind is op.LITERAL:
        return [chr(argument)]
    candidates = [*CHARACTERS]
    if kind is op.IN:
        candidates += [chr(value) for part, value in argument if part is op.LITERAL]
        candidates += [chr(value[0]) for part, value in argument if part is op.RANGE]
        argument = tuple(argument)
    return [one for one in dict.fromkeys(candidates) if character_matches(kind, argument, one)][:10]


def samples(items: Any) -> list[str]:
    """Some texts that a part of a pattern matches."""
    found = [""]
    for kind, argument in items:
        if kind in (op.LITERAL, op.NOT_LITERAL, op.ANY, op.IN):
            parts = characters_of(kind, argument)
        elif kind is op.SUBPATTERN:
            parts = samples(argument[3])
        elif kind is op.BRANCH:
            parts = [text for branch in argument[1] for text in samples(branch)]
        elif kind in (op.MAX_REPEAT, op.MIN_REPEAT):
            parts = [text * max(1, argument[0]) for text in samples(argument[2])] + ([""] if not argument[0] else [])
        else:
            parts = [""]
        found = [text + part for text in found for part in parts[: max(2, MAX_SAMPLES // len(found))]][:MAX_SAMPLES]
    return found


def repeats(items: Any, before: list[str]) -> Iterator[tuple[str, str]]:
    """What a pattern matches before each of its long repeats, with a text that the repeat matches."""
    seen: list[Any] = []
    for kind, argument in items:
        here = [text + more for text in before[:3] for more in samples(seen)[:3]]
        if kind is op.SUBPATTERN:
            yield from repeats(argument[3], here)
        elif kind is op.BRANCH:
            for branch in argument[1]:
                yield from repeats(branch, here)
        elif kind in (op.MAX_REPEAT, op.MIN_REPEAT):
            if argument[1] > 1000:
                yield from ((text, round_) for text in here for round_ in samples(argument[2]) if round_)
            yield from repeats(argument[2], here)
        seen.append((kind, argument))


def hostile_texts(pattern: re.Pattern[Any]) -> Iterator[str]:
    parsed = _parser.parse(pattern.pattern, pattern.flags & ~re.DEBUG)
    pumped = set(repeats(parsed, [""])) | {("", one) for one in samples(parsed) if one}
    for before, round_ in sorted(pumped)[:: 1 + len(pumped) // MAX_TEXTS]:
        for end in ("", "\x01", before[-1:] + "\x01"):
            yield before + round_ * ((LENGTH - len(before)) // len(round_)) + end


USES = find_uses()


@pytest.mark.parametrize("name", USES)
def test_a_regular_expression_takes_time_that_grows_with_the_text(name: str) -> None:
    use = USES[name]
    for text in hostile_texts(use.pattern):
        try:
            use.apply(text)
        except TooSlow:
            pytest.fail(f"{use.pattern.pattern!r} is too slow for {text[:40]!r}… that ends with {text[-10:]!r}")


@pytest.mark.parametrize(
    "pattern",
    [
        r'(\w+)="([^"\\]*)"',
        r"([!-9A-z]+):[ \t]*([\t\x20-\x7e]*?)[ \t]*",
        r"a/b(?:[ \t]*;[ \t]*(?:([a-z]+)=([a-z]+))?)*[ \t]*",
        r"(?:a|a)*b",
        r".*x.*y.*z",
    ],
)
def test_the_derived_texts_expose_patterns_that_backtrack(pattern: str) -> None:
    use = Use(re.compile(pattern, re.DOTALL), searches=True)
    assert any(is_slow(use, text) for text in hostile_texts(use.pattern))


def is_slow(use: Use, text: str) -> bool:
    try:
        use.apply(text, cpu_s=0.1)
    except TooSlow:
        return True
    return False
