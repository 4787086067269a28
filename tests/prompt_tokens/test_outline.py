"""The outline of a body holds what the real parser finds, and equal beginnings have equal digests."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmroute._kernel._messages import digest, outline

values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text()),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=6), inner, max_size=4)),
    max_leaves=12,
)
names = st.one_of(st.just("messages"), st.text("abcdefg_é", max_size=6))


def items(body: bytes, spans: bytes) -> list[Any]:
    ends = memoryview(spans).cast("I")
    return [json.loads(body[ends[i] : ends[i + 1]]) for i in range(0, len(ends), 2)]


@given(st.dictionaries(names, values, max_size=5), st.booleans(), st.sampled_from([None, 2]))
def test_every_field_lies_where_it_says(tree, ascii_only, indent):
    body = json.dumps(tree, ensure_ascii=ascii_only, indent=indent).encode("utf-8", "surrogatepass")
    found = outline(body, b"messages")
    if found is None:
        assert b"\\" in body  # an escaped name
        return
    fields, spans, digests = found
    assert {name: json.loads(body[start:end]) for name, (start, end) in fields.items()} == {
        name: value for name, value in tree.items() if name.isascii()
    }
    if isinstance(tree.get("messages"), list):
        assert items(body, spans) == tree["messages"]
        assert len(digests) == 16 * len(tree["messages"])
    else:
        assert spans == digests == b""


@given(st.binary(max_size=40), st.integers(0, 39), st.sampled_from(b'{}[],:"\\ 01e.-nulltru'))
def test_it_never_reads_what_the_parser_refuses(noise, at, byte):
    for body in (noise, b'{"messages": [{"a": "b"}, 1.5, null], "x": {"y": []}}'):
        changed = body[:at] + bytes([byte]) + body[at + 1 :]
        found = outline(changed, b"messages")
        if found is not None:
            tree = json.loads(changed.decode("utf-8", "replace"))
            assert isinstance(tree, dict) and set(found[0]) <= set(tree)


@given(st.lists(values, min_size=1, max_size=5), st.lists(values, max_size=3), st.lists(values, max_size=3))
def test_equal_beginnings_have_equal_digests_and_no_others(start, one, other):
    def digests(messages: list[Any], indent: int | None) -> list[bytes]:
        found = outline(json.dumps({"messages": messages}, indent=indent).encode(), b"messages")
        assert found is not None
        return [found[2][i : i + 16] for i in range(0, len(found[2]), 16)]

    first, second = digests(start + one, None), digests(start + other, None)
    for i, (a, b) in enumerate(zip(first, second, strict=False)):
        same = json.dumps((start + one)[: i + 1]) == json.dumps((start + other)[: i + 1])
        assert (a == b) == same
    assert len(set(first)) == len(first)


def test_a_digest_depends_on_every_byte():
    text = bytes(range(100))
    whole = digest(text, 0, 100)
    assert len({digest(text[:i] + b"\xff" + text[i + 1 :], 0, 100) for i in range(100)} | {whole}) == 101
    assert len({digest(bytes(n), 0, n) for n in range(100)}) == 100
    assert digest(b"xx" + text, 2, 102) == whole


def test_the_last_of_equal_names_counts():
    body = b'{"messages": [1, 2], "a": 1, "messages": [3], "a": 2}'
    fields, spans, _digests = outline(body, b"messages")
    assert items(body, spans) == [3]
    assert body[slice(*fields["a"])] == b"2"


def test_wrong_calls_are_errors():
    for arguments in [("{}", b"x"), (b"{}",), (b"{}", "x")]:
        with pytest.raises(TypeError):
            outline(*arguments)
    with pytest.raises(ValueError):
        digest(b"abc", 2, 5)
