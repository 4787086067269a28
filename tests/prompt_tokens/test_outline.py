"""The outline of a body holds what the real parser finds, and equal beginnings have equal digests."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from warmroute._kernel._messages import digest, digests
from warmroute._kernel._scan import Outline, outline_of, scan
from warmroute.prompt.request import Request, Shape, request_of, stand_in_of

values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text()),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=6), inner, max_size=4)),
    max_leaves=12,
)
names = st.one_of(st.just("messages"), st.text("abcdefg_é", max_size=6))


def items(body: bytes, spans: bytes) -> list[Any]:
    ends = memoryview(spans).cast("I")
    return [json.loads(body[ends[i] : ends[i + 1]]) for i in range(0, len(ends), 2)]


@given(st.dictionaries(names, values, max_size=20), st.booleans(), st.sampled_from([None, 2]))
def test_every_field_lies_where_it_says(tree, ascii_only, indent):
    body = json.dumps(tree, ensure_ascii=ascii_only, indent=indent).encode("utf-8", "surrogatepass")
    found = outline_of(body)
    if found is None:
        assert b"\\" in body  # an escaped name
        return
    assert {name: json.loads(body[start:end]) for name, (start, end) in found.fields.items()} == {
        name: value for name, value in tree.items() if name.isascii()
    }
    assert items(body, found.spans) == (tree["messages"] if isinstance(tree.get("messages"), list) else [])


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 16, 17, 1000])
def test_many_fields_and_many_messages_have_room(count):
    tree = {"messages": [{"role": "tool", "content": n} for n in range(count)], **{f"f{n}": n for n in range(count)}}
    body = json.dumps(tree).encode()
    found = outline_of(body)
    assert items(body, found.spans) == tree["messages"]
    assert {name: json.loads(body[slice(*where)]) for name, where in found.fields.items()} == tree
    assert found.fields is found.fields, "made once"


@given(st.binary(max_size=40), st.integers(0, 39), st.sampled_from(b'{}[],:"\\ 01e.-nulltru'))
def test_it_never_reads_what_the_parser_refuses(noise, at, byte):
    for body in (noise, b'{"messages": [{"a": "b"}, 1.5, null], "x": {"y": []}}'):
        changed = body[:at] + bytes([byte]) + body[at + 1 :]
        found = outline_of(changed)
        if found is not None:
            tree = json.loads(changed.decode("utf-8", "replace"))
            assert isinstance(tree, dict) and set(found.fields) <= set(tree)


@given(st.lists(values, min_size=1, max_size=5), st.lists(values, max_size=3), st.lists(values, max_size=3))
def test_equal_beginnings_have_equal_digests_and_no_others(start, one, other):
    def digests_of(messages: list[Any], indent: int | None) -> list[bytes]:
        body = json.dumps({"messages": messages}, indent=indent).encode()
        found = outline_of(body)
        assert found is not None
        made = digests(body, found.spans)
        return [made[i : i + 16] for i in range(0, len(made), 16)]

    first, second = digests_of(start + one, None), digests_of(start + other, None)
    assert len(first) == len(start + one)
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
    body = b'{"messages": [1, 2], "a": 1, "messages": [3], "a": 2, "stream": true, "stream": 0, "priority": 1}'
    found = outline_of(body)
    assert items(body, found.spans) == [3]
    assert body[slice(*found.fields["a"])] == b"2"
    assert found.about(None) == ("", None, 1, "", False)
    assert found.stand_in() == b"[3\0\0"


def test_wrong_calls_are_errors():
    for call in (scan, outline_of):
        with pytest.raises(TypeError):
            call("{}")
    with pytest.raises(TypeError):
        Outline()
    with pytest.raises(ValueError):
        digest(b"abc", 2, 5)
    for arguments in [("{}", b""), (b"{}",), (b"{}", "x")]:
        with pytest.raises(TypeError):
            digests(*arguments)
    for spans in [(2, 5), (2, 1), (0, 1, 4, 4)]:
        with pytest.raises(ValueError):
            digests(b"abc", b"".join(at.to_bytes(4, "little") for at in spans))


# What it says beside the prompt, and what stands in for tokens: as the plain readers have it.

texts = st.one_of(
    st.sampled_from(
        [b'"m"', b'""', b'"org/Model-7b"', b'"\\u00e9\\n"', b'"\\ud83d"', '"é"'.encode(), b'"\xed\xa0\xbd"', b'"\xff"']
    ),
    st.text(max_size=12).map(lambda text: json.dumps(text, ensure_ascii=False).encode("utf-8", "surrogatepass")),
    st.just(b'"' + b"x" * 1023 + b'"'),
)
numbers = st.one_of(
    st.sampled_from(
        [b"0", b"-0", b"7", b"-1", b"1.0", b"1e3", b"-0.0", b"1e999", b"9" * 17, b"9" * 18, b"9" * 19, b"-" + b"9" * 18]
    ),
    st.integers().map(lambda number: b"%d" % number),
)
scalars = st.one_of(texts, numbers, st.sampled_from([b"true", b"false", b"null"]))
nested = st.sampled_from(
    [b"[]", b"{}", b"[1]", b'[{"role":"user","content":"hi"}]', b'["\xff"]', b' [ "a" , {} ] ', b"[" * 99 + b"]" * 99]
)
fields = st.sampled_from(
    b"model cache_salt stream priority max_completion_tokens max_tokens max_output_tokens"
    b" system instructions tools prompt input messages other".split()
)
members = st.tuples(fields, st.one_of(scalars, scalars, nested))
bodies = st.lists(members, max_size=10).map(lambda all: b"{" + b",".join(b'"%b": %b' % one for one in all) + b"}")


@given(bodies, st.sampled_from(Shape))
@settings(max_examples=500, deadline=None)
def test_what_it_says_is_what_the_parser_reads(body, shape):
    request = request_of(shape.value, body)
    assert request is not None
    assert request.about() == request.about_plainly()
    assert request.outline.stand_in() == request.stand_in_plainly()
    prompt = stand_in_of(shape.value, body)
    expected = request.about_plainly()
    expected.tokens, expected.exact, expected.doubt = request.stand_in_plainly(), False, "the tokenizer is not known"
    assert prompt == expected
    scanned = scan(body)
    if scanned is not None:
        assert stand_in_of(shape.value, body, scanned[4]) == expected
        assert Request(shape, body, scanned[4]).fields == request.fields


def test_common_bodies_need_no_parser():
    body = b'{"model":"m","messages":[{"role":"user","content":"hi"}],"stream":true,"max_tokens":500,"priority":-1}'
    assert scan(body)[4].about(None) == ("m", 500, -1, "", True)
    assert outline_of(b'{"prompt":"a","max_completion_tokens":null,"cache_salt":"s"}').about(16) == (
        "",
        16,
        0,
        "s",
        False,
    )
    assert outline_of(b'{"max_tokens":null}').about(16) == ("", None, 0, "", False)


def test_paths_without_prompts_and_bodies_that_are_none():
    assert request_of(b"/v1/rerank", b"{}") is None and stand_in_of(b"/v1/rerank", b"{}") is None
    assert request_of(Shape.CHAT.value, b"{") is None and stand_in_of(Shape.CHAT.value, b"{") is None
