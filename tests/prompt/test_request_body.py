"""The outline of a body agrees with a JSON parser, and equal message lists have equal digests."""

from __future__ import annotations

import json
from typing import Any

import pytest
import reference_body
from hypothesis import given, settings
from hypothesis import strategies as st

from warmroute._kernel import (
    MAX_LOOKUP_TOKENS,
    BadBody,
    Outline,
    decode_ms,
    digest,
    outline_body,
    prefix_digests,
    scan_body,
)
from warmroute.prompt.prompt import Prompt
from warmroute.prompt.request_body import Endpoint, RequestBody, read_json, read_request_body, text_prompt
from warmroute.prompt.template_messages import UnsupportedRequest

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
def test_the_outline_has_the_position_of_every_field(
    tree: dict[str, Any], ascii_only: bool, indent: int | None
) -> None:
    body = json.dumps(tree, ensure_ascii=ascii_only, indent=indent).encode("utf-8", "surrogatepass")
    found = outline_body(body)
    assert {name: json.loads(body[start:end]) for name, (start, end) in found.fields.items()} == {
        name: value for name, value in tree.items() if name.isascii()
    }
    assert items(body, found.message_spans) == (tree["messages"] if isinstance(tree.get("messages"), list) else [])


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 16, 17, 999])
def test_any_number_of_fields_and_messages_is_found(count: int) -> None:
    tree = {"messages": [{"role": "tool", "content": n} for n in range(count)], **{f"f{n}": n for n in range(count)}}
    body = json.dumps(tree).encode()
    found = outline_body(body)
    assert items(body, found.message_spans) == tree["messages"]
    assert {name: json.loads(body[slice(*where)]) for name, where in found.fields.items()} == tree
    assert found.fields is found.fields, "created once"


@given(st.binary(max_size=40), st.integers(0, 39), st.sampled_from(b'{}[],:"\\ 01e.-nulltru'))
def test_a_body_that_the_parser_refuses_has_no_outline(noise: bytes, at: int, byte: int) -> None:
    for body in (noise, b'{"messages": [{"a": "b"}, 1.5, null], "x": {"y": []}}'):
        changed = body[:at] + bytes([byte]) + body[at + 1 :]
        try:
            found = outline_body(changed)
        except BadBody:
            continue
        tree = json.loads(changed.decode())
        assert isinstance(tree, dict) and set(found.fields) <= set(tree)


@given(st.lists(values, min_size=1, max_size=5), st.lists(values, max_size=3), st.lists(values, max_size=3))
def test_message_lists_have_equal_digests_exactly_as_far_as_they_are_equal(
    start: list[Any], one: list[Any], other: list[Any]
) -> None:
    def digests_of(messages: list[Any], indent: int | None) -> list[bytes]:
        body = json.dumps({"messages": messages}, indent=indent).encode()
        found = outline_body(body)
        packed = prefix_digests(body, found.message_spans)
        return [packed[i : i + 16] for i in range(0, len(packed), 16)]

    first, second = digests_of(start + one, None), digests_of(start + other, None)
    assert len(first) == len(start + one)
    for i, (a, b) in enumerate(zip(first, second, strict=False)):
        same = json.dumps((start + one)[: i + 1]) == json.dumps((start + other)[: i + 1])
        assert (a == b) == same
    assert len(set(first)) == len(first)


def test_a_digest_depends_on_every_byte() -> None:
    text = bytes(range(100))
    whole = digest(text, 0, 100)
    assert len({digest(text[:i] + b"\xff" + text[i + 1 :], 0, 100) for i in range(100)} | {whole}) == 101
    assert len({digest(bytes(n), 0, n) for n in range(100)}) == 100
    assert digest(b"xx" + text, 2, 102) == whole


def test_of_unknown_fields_with_equal_names_the_last_counts() -> None:
    body = b'{"a": 1, "messages": [3], "\\u0061": 2, "priority": 1}'
    found = outline_body(body)
    assert items(body, found.message_spans) == [3]
    assert body[slice(*found.fields["a"])] == b"2"
    assert found.has_any(("b", "a")) and not found.has_any(("b",))
    assert found.parameters(7, None) == (None, 1, False)
    assert found.text_as_tokens() == b"[3\0\0"


def test_wrong_arguments_are_errors() -> None:
    for call in (scan_body, outline_body):
        with pytest.raises(TypeError):
            call("{}")  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        Outline()
    with pytest.raises(ValueError):
        outline_body(b"{}").parameters(8, None)
    for span in [(-1, 1), (1, 0), (0, 3)]:
        with pytest.raises(ValueError):
            decode_ms(b"{}", *span)
    with pytest.raises(ValueError):
        digest(b"abc", 2, 5)
    for arguments in [("{}", b""), (b"{}",), (b"{}", "x")]:
        with pytest.raises(TypeError):
            prefix_digests(*arguments)  # type: ignore[arg-type]
    for spans in [(2, 5), (2, 1), (0, 1, 4, 4)]:
        with pytest.raises(ValueError):
            prefix_digests(b"abc", b"".join(at.to_bytes(4, "little") for at in spans))


# Options and text prompts, compared with plain Python.

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


def text_tokens(request: RequestBody) -> bytes:
    """The reference of Outline.stand_in: the bytes of the prompt's fields, padded to four bytes a token.

    Closing brackets and quotes at the end are dropped, so that a prompt and its continuation start with the same
    tokens.
    """
    names = ("system", "instructions", "tools", "prompt", "input", "messages")
    pieces = [request.body[slice(*request.fields[name])] for name in names if name in request.fields]
    text = b"".join(pieces).rstrip(b']}" \r\n\t')
    return text + bytes(-len(text) % 4)


@given(bodies, st.sampled_from(Endpoint))
@settings(max_examples=500, deadline=None)
def test_options_and_text_prompts_equal_those_of_a_json_parser(body: bytes, endpoint: Endpoint) -> None:
    try:
        request = read_request_body(endpoint.value, body)
        expected = reference_body.options(endpoint, reference_body.parse(body)) if request is not None else None
    except reference_body.Rejected:
        request = expected = None
    try:
        *_, outline, max_tokens, priority_, streams = read_json(endpoint.value, body)
        found = (max_tokens, priority_, streams)
    except BadBody:
        try:
            parsed = reference_body.read_json(body)
        except reference_body.Rejected:
            return
        too_long = [name for name in (parsed[0], expected[2] if expected else "") if len(name) > 1022]
        assert expected is None or too_long
        return
    assert request is not None and expected is not None
    max_output_tokens, priority, salt, stream = expected
    assert found == (max_output_tokens, priority, stream)
    assert request.cache_salt() == salt
    assert request.outline.text_as_tokens() == text_tokens(request)
    if endpoint not in (Endpoint.COMPLETION, Endpoint.EMBEDDING):  # those may have several prompts
        prompt = Prompt(text_tokens(request), 0, False, "no tokenizer for this model", (), salt)
        assert text_prompt(endpoint.value, body) == text_prompt(endpoint.value, body, outline) == prompt
    assert RequestBody(endpoint, body, outline).fields == request.fields


def options(path: bytes, **fields: Any) -> tuple[int | None, int, bool]:
    return read_json(path, json.dumps(fields).encode())[5:]


def test_generation_options_come_from_the_fields_of_each_endpoint() -> None:
    many = {"stream": True, "max_tokens": 5, "max_completion_tokens": 7, "max_output_tokens": 9, "priority": -3}
    assert options(b"/v1/chat/completions", **many) == (7, -3, True)
    assert options(b"/v1/completions", **many) == (5, -3, True)
    assert options(b"/v1/completions", prompt="x") == (16, 0, False)
    assert options(b"/v1/completions", max_tokens=None) == (None, 0, False)
    assert options(b"/v1/responses", **many) == (9, -3, True)
    assert options(b"/v1/messages", **many) == (5, -3, True)
    assert options(b"/v1/rerank", stream=False, priority=-1) == (None, -1, True)
    assert options(b"/v1/chat/completions", stream=None, max_tokens=5.0, priority=None) == (5, 0, False)


CONVERTIBLE: dict[str, tuple[Any, ...]] = {
    "max_tokens": ("5", "", True, False, [5], {}, 1.5, float("nan"), 1e300),
    "stream": ("true", "", 1, 0, [], {}),
    "cache_salt": (1, True, [], {}, "x" * 1100),
}
for _name in ("max_completion_tokens", "max_output_tokens", "priority"):
    CONVERTIBLE[_name] = CONVERTIBLE["max_tokens"]


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, some in CONVERTIBLE.items() for value in some])
def test_a_value_that_an_engine_might_convert_is_rejected(name: str, value: Any) -> None:
    """Pydantic takes "5", true and 5.0 for integers, and 1 and "yes" for true."""
    with pytest.raises(BadBody) as caught:
        options(b"/v1/rerank", **{name: value})
    assert caught.value.args[1] == name


def test_large_integers_are_cut_off() -> None:
    assert options(b"/v1/messages", max_tokens=2**63 - 1, priority=-(10**600)) == (10**18, -(10**18), False)


def test_long_text_prompts_are_cut_off() -> None:
    outline = outline_body(b'{"system":"%b","prompt":"%b"}' % (b"s" * 1000, b"p" * (5 << 20)))
    tokens = outline.text_as_tokens()
    assert len(tokens) == MAX_LOOKUP_TOKENS * 4
    assert tokens.startswith(b'"' + b"s" * 1000 + b'""ppp')


def test_the_cost_of_parsing_counts_what_is_not_text() -> None:
    """A parser takes about 300 ns for a member, and 2 ns for a byte of text."""
    text, members = b'"' + b'[{,:\\"' * 1000 + b'"', b"{" + b'"a":{},' * 1000 + b'"b":1}'
    assert decode_ms(text, 0, len(text)) == 2 * len(text) / 1e6
    assert decode_ms(members, 0, len(members)) > 0.5
    assert decode_ms(b"x" + text, 1, 1) == 0.0


def test_a_value_that_takes_too_long_to_parse_is_not_parsed() -> None:
    for value in (b"[" * 200 + b"]" * 200, b'{"a":1}', b"1"):
        body = b'{"prompt":[%b]}' % b",".join([value] * ((8 << 20) // (len(value) + 1)))
        request = read_request_body(b"/v1/completions", body)
        assert request is not None
        with pytest.raises(UnsupportedRequest, match="too large"):
            request.value("prompt")
    body = b'{"prompt":"%b"}' % (b"word " * (1 << 20))
    request = read_request_body(b"/v1/completions", body)
    assert request is not None and len(request.value("prompt")) == 5 << 20


def test_paths_without_prompts_and_invalid_bodies_have_no_prompt() -> None:
    assert read_request_body(b"/v1/rerank", b"{}") is None and text_prompt(b"/v1/rerank", b"{}") is None
    assert read_request_body(Endpoint.CHAT.value, b"{") is None and text_prompt(Endpoint.CHAT.value, b"{") is None
