"""The scan reads the fields of every body as a JSON parser does, and rejects what an engine might read differently."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import reference_body
from hypothesis import given, settings
from hypothesis import strategies as st
from json_bodies import (
    ACCEPTED_NUMBERS,
    BODIES,
    NUMBERS,
    REFUSED_NUMBERS,
    SAMPLES,
    VALUES,
    WHITESPACE,
    chat,
)
from prompt_data import agent_chats, public_chats, small_chats
from reference_body import Fields, Rejected

from warmroute._kernel import KEY_CHARACTERS, BadBody, scan_body
from warmroute.core.messages import RoutingRequest
from warmroute.prompt.request_body import read_json

CHAT = b"/v1/chat/completions"


def scanned_fields(body: bytes) -> Fields | None:
    try:
        return scan_body(body)[:4]
    except BadBody:
        return None


def parsed_fields(body: bytes) -> Fields | None:
    try:
        return reference_body.read_json(body)
    except Rejected:
        return None


def assert_equal_fields(body: bytes) -> None:
    scanned, parsed = scanned_fields(body), parsed_fields(body)
    if scanned is None and parsed is not None:
        # the limit is for the name as it lies in the body: a character may take six bytes
        assert 12 * len(parsed[0]) > reference_body.MAX_NAME_BYTES - 2, body  # as JSON may escape a character
        return
    assert scanned == parsed, body


def request_of(body: bytes, **more: Any) -> RoutingRequest:
    return RoutingRequest(*read_json(CHAT, body)[:4], **more)


# What the routing request contains.


def test_the_prefix_key_contains_the_model_and_both_starts() -> None:
    request = request_of(json.dumps(chat("S" * 300, "é" * 300)).encode())
    assert request.model == "some/model-7b"
    assert request.prefix_key() == b"some/model-7b\0" + b"S" * KEY_CHARACTERS + b"\0" + "é".encode() * KEY_CHARACTERS


def test_a_session_header_takes_precedence_over_the_body() -> None:
    assert request_of(b'{"user":"ann"}').session_key() == b"ann"
    assert request_of(b'{"user":"ann"}', session_header=b"from-header").session_key() == b"from-header"


def test_session_fields_have_an_order_and_empty_ones_are_skipped() -> None:
    assert request_of(b'{"user":"u","conversation_id":"c","session_id":""}').session_key() == b"c"
    assert request_of(b'{"user":7,"prompt_cache_key":null,"session_id":1.5}').session_key() == b"7"


def test_a_body_without_a_prompt_has_no_prefix_key() -> None:
    assert request_of(b'{"model":"m"}').prefix_key() is None
    assert request_of(b'{"model":"m","messages":[{"role":"user"}]}').prefix_key() == b"m\0\0"


@pytest.mark.parametrize("name", sorted(reference_body.ROUTER_FIELDS))
def test_a_field_of_the_router_must_not_be_given_twice(name: str) -> None:
    """Parsers differ in which one counts."""
    escaped = f"\\u{ord(name[0]):04x}{name[1:]}"
    for other in (name, escaped):
        with pytest.raises(BadBody) as caught:
            read_json(CHAT, f'{{"{name}":null,"other":1,"{other}":null,"other":2}}'.encode())
        assert caught.value.args == ("must be given only once", name)


@pytest.mark.parametrize("value", ["7", "true", "[]", '["m"]', "{}", "NaN", "1.5"])
def test_a_model_that_is_not_a_string_is_rejected(value: str) -> None:
    with pytest.raises(BadBody) as caught:
        read_json(CHAT, f'{{"model":{value}}}'.encode())
    assert caught.value.args == ("must be a string", "model")


def test_a_model_may_have_1024_bytes() -> None:
    assert read_json(CHAT, b'{"model":"%b"}' % (b"x" * 1022))[0] == "x" * 1022
    assert read_json(CHAT, b'{"model":"%b"}' % (b"\\u0041" * 170))[0] == "A" * 170
    for text in (b"x" * 1023, b"\\u0041" * 171):
        with pytest.raises(BadBody) as caught:
            read_json(CHAT, b'{"model":"%b"}' % text)
        assert caught.value.args == ("must be at most 1,024 bytes long", "model")


def test_a_field_name_with_escapes_is_the_field() -> None:
    assert request_of(b'{"\\u006dodel":"m","messag\\u0065s":[{"rol\\u0065":"us\\u0065r","cont\\u0065nt":"c"}]}') \
        .prefix_key() == b"m\0\0c"  # fmt: skip


def test_a_body_has_at_most_1000_fields_and_250000_messages() -> None:
    fields = b",".join(b'"f%d":1' % n for n in range(999))
    assert read_json(CHAT, b'{"model":"m",%b}' % fields)[0] == "m"
    with pytest.raises(BadBody, match="1,000 fields"):
        read_json(CHAT, b'{"model":"m","x":1,%b}' % fields)
    assert read_json(CHAT, b'{"messages":[%b1]}' % (b"1," * 249_999))[0] == ""
    with pytest.raises(BadBody, match="250,000 items"):
        read_json(CHAT, b'{"messages":[%b1]}' % (b"1," * 250_000))


def test_a_byte_order_mark_is_skipped_and_other_encodings_are_rejected() -> None:
    assert read_json(CHAT, b'\xef\xbb\xbf {"model":"m"}')[0] == "m"
    for encoding in ("utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be", "cp037"):
        with pytest.raises(BadBody):
            read_json(CHAT, '{"model":"m"}'.encode(encoding))


NOT_UTF8 = [
    bytes.fromhex(text)
    for text in (
        "80", "bf", "c080", "c1bf", "c3", "c328", "e08080", "e09fbf", "e282", "e228a1", "e28228", "eda080", "edbfbf",
        "f0808080", "f08fbfbf", "f09f98", "f0288cbc", "f09f28bc", "f09f9828", "f4908080", "f5808080", "f888808080",
        "fe", "ff", "c3a9a9", "e282acac",
    )
]  # fmt: skip


@pytest.mark.parametrize("text", NOT_UTF8, ids=bytes.hex)
def test_bytes_that_are_not_utf_8_are_rejected_wherever_they_lie(text: bytes) -> None:
    for body in (
        b'{"model":"m","%b":1}',
        b'{"model":"m","other":"%b"}',
        b'{"model":"m","other":{"%b":[]}}',
        b'{"model":"m","messages":[{"role":"user","content":"c","%b":1}]}',
        b'{"model":"m","messages":[{"role":"assistant","content":"%b"}]}',
    ):
        for size in (0, 1, 100_000):
            with pytest.raises(BadBody) as caught:
                read_json(CHAT, b" " * size + body % text)
            assert caught.value.args == ("it is not UTF-8 text", None)


def test_text_is_checked_at_every_position() -> None:
    """The check reads blocks of 64 and 32 bytes, and of 8 on processors without AVX2."""
    characters = ["é", "€", "\u0800", "\ud7ff", "\ue000", "\uffff", "\U00010000", "😀", "\U0010ffff"]
    good = [*(one.encode() for one in characters), "é€😀é".encode() * 20]
    for at in range(140):
        for after in (0, 1, 70):
            for text in good:
                assert read_json(CHAT, b'{"%b%b":"%b"}' % (b"a" * at, text, b"b" * after))[0] == ""
            for text in NOT_UTF8:
                assert scanned_fields(b'{"%b%b":"%b"}' % (b"a" * at, text, b"b" * after)) is None


def test_names_nested_in_other_values_do_not_count() -> None:
    body = b'{"tools":[{"model":"no","messages":[]}],"messages":[{"role":"tool","content":[{"role":"user"}]}]}'
    assert request_of(body).model == ""
    assert request_of(body).prefix_key() is None


@pytest.mark.parametrize(
    "body", [b"", b" ", b"{", b"[]", b'"a"', b"{} {}", b'{"a":1,}', b"{'a':1}", b"\xff", b'{"a":\xa0}']
)
def test_a_body_that_is_not_an_object_is_refused_with_a_reason(body: bytes) -> None:
    with pytest.raises(BadBody, match=r"\w"):
        read_json(CHAT, body)


def test_a_number_too_long_for_python_is_refused() -> None:
    assert_equal_fields(b'{"seed":%b}' % (b"9" * 5000))
    with pytest.raises(BadBody, match="digits"):
        read_json(CHAT, b'{"seed":%b}' % (b"9" * 5000))


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: "-".join(sample) or "empty")
@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("ascii_only", [True, False])
def test_common_bodies(sample: dict[str, Any], indent: int | None, ascii_only: bool) -> None:
    body = json.dumps(sample, ensure_ascii=ascii_only, indent=indent).encode()
    assert scanned_fields(body) is not None
    assert_equal_fields(body)


def test_only_bytes_are_scanned() -> None:
    with pytest.raises(TypeError):
        scan_body("{}")  # type: ignore[arg-type]


# The scan compared with the parser.


@pytest.mark.parametrize(
    "body",
    [
        b'{"user":-0}',
        b'{"user":"\\ud83d\\ude00\\ud83d"}',
        b'{"prompt":"\\ud83d\\ud83d\\ude00\\ude00\\ude00\\u0041"}',
        b'{"prompt":[true,false,null,-0]}',
        b'{"prompt":[true,false,null,1,1.5,"a",[2,["b"]],{"text":"c"}]}',
        b'{"prompt":[[[[[["deep"]]]]]]}',
        b'{"prompt":{"content":"a","text":"b","text":null}}',
        b'{"prompt":{"text":"a","content":"b"}}',
        b'{"prompt":{"te\\u0078t":"a","content":"b"}}',
        b'{"mod\\u0065l":"m"}',
        b'{"messages":[{"role":"us\\u0065r","content":"c"},{"role":"user","content":"d"}]}',
        b'{"messages":[{"rol\\u0065":"user","content":"c"},{"role":"user","content":"d"}]}',
        b'{"messages":[{"role":"system","content":"1"},{"role":"developer","content":"2"},{"role":"user"}]}',
        b'{"messages":[{"role":"user","content":"1"},{"role":"system","content":"2"}]}',
        b'{"messages":[{"role":"user","content":"1"}],"prompt":"2","system":"3","instructions":"4"}',
        b'{"messages":[{"role":"user","content":"1","role":"tool"}],"input":"2","prompt":null}',
        b'{"messages":[{"role":"user","content":"1"}],"messages":{"role":"user"}}',
        b'{"messages":[{"role":"user","content":"\xed\xa0\xbd\xed\xb8\x80"}],"model":"\xed\xa0\xbd\xed\xb8\x80"}',
        b'{"model":"\xc0\x80"}',
        b'{"other":"\xa9","model":"\xed\xa0\xbd"}',
        b'{"model":7,"session_id":[],"conversation_id":true,"prompt_cache_key":{},"user":"\\u0000"}',
        b'\xef\xbb\xbf{"model":"bom"}',
        '{"model":"utf-16"}'.encode("utf-16"),
        '{"model":"utf-16"}'.encode("utf-16-le"),
        '{"model":"utf-32"}'.encode("utf-32-le"),
        b'{"model":"m"}\0',
        b'{"model":"m"} \n\r\t',
        b'{"model":"m"}\x0b',
    ],
)
def test_unusual_bodies(body: bytes) -> None:
    assert_equal_fields(body)


@pytest.mark.parametrize("number", ACCEPTED_NUMBERS + REFUSED_NUMBERS)
def test_numbers(number: str) -> None:
    for text in (
        f'{{"a":{number}}}',
        f'{{"prompt":[{number} ]}}',
        f'{{"user":{number},"model":"m"}}',
        f'{{"a":{number}',
    ):
        assert_equal_fields(text.encode())


@given(BODIES)
@settings(max_examples=300, deadline=None)
def test_generated_bodies(body: bytes) -> None:
    assert_equal_fields(body)


@given(BODIES, st.data())
@settings(max_examples=300, deadline=None)
def test_generated_bodies_with_bytes_changed(body: bytes, data: st.DataObject) -> None:
    changed = bytearray(body)
    for _change in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(changed)))
        width = data.draw(st.sampled_from([0, 1, 1, 2]))
        changed[at : at + width] = data.draw(
            st.binary(max_size=2)
            | st.sampled_from([b'"', b"\\", b"\\u", b"{", b"}", b"[", b"]", b",", b":", b"0", b"-"])
        )
    assert_equal_fields(bytes(changed))


@given(st.one_of(VALUES, NUMBERS), WHITESPACE, st.one_of(st.just(""), VALUES))
@settings(max_examples=300, deadline=None)
def test_generated_values(value: str, space: str, after: str) -> None:
    for text in (f"{space}{value}{space}{after}", f'{{"model":{value}{space}}}{after}', f'{{"a":[{value},{value}]}}'):
        assert_equal_fields(text.encode("utf-8", "surrogatepass"))


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: "-".join(sample) or "empty")
def test_truncated_bodies(sample: dict[str, Any]) -> None:
    for ascii_only in (True, False):
        body = json.dumps(sample, ensure_ascii=ascii_only).encode()
        for end in range(len(body)):
            assert scanned_fields(body[:end]) is None
        assert_equal_fields(body[: len(body) // 2])


def test_bodies_with_one_byte_changed() -> None:
    rng = random.Random(7)
    for sample in SAMPLES[:3]:
        body = json.dumps(sample).encode()
        for at in range(len(body)):
            for byte in (*b'"\\u}]', rng.randrange(256)):
                assert_equal_fields(body[:at] + bytes((byte,)) + body[at + 1 :])


def test_rows_of_backslashes_at_every_position() -> None:
    """The scan reads strings in blocks of 16, 32 and 64 bytes."""
    for at in range(140):
        for row in (1, 2, 3, 4, 63, 64, 65):
            for after in (b'"', b"n", b"u00e9", b"u00g9", b"x", b"\n", b""):
                text = b"a" * at + b"\\" * row + after
                for rest in (b'"}', b"b" * 70 + b'"}'):
                    assert_equal_fields(b'{"prompt":"' + text + rest)


def test_control_characters_and_quotes_at_every_position() -> None:
    for at in range(140):
        for byte in (0x00, 0x1F, 0x20, 0x21, 0x22, 0x23, 0x5C, 0x7F, 0x80, 0xC3, 0xFF):
            text = b"a" * at + bytes((byte,)) + b"b" * (139 - at)
            assert_equal_fields(b'{"prompt":"' + text + b'"}')
            assert_equal_fields(b'{"other":"' + text + b'"}')


def test_every_byte_after_a_backslash_or_quote() -> None:
    for one in range(256):
        assert_equal_fields(b'{"prompt":"' + b"a" * 70 + b"\\" + bytes((one,)) + b"0041" + b"a" * 70 + b'"}')
        assert_equal_fields(b'{"prompt":"\\u' + bytes((one,)) + b'041"}')
        assert_equal_fields(b'{"prompt":"a"' + bytes((one,)) + b"}")
        for two in (0x00, 0x7F, 0x80, 0x9F, 0xA0, 0xBF, 0xC0):
            assert_equal_fields(b'{"prompt":"' + bytes((one, two, 0x80, 0x80)) + b'"}')


def test_texts_about_as_long_as_the_key() -> None:
    for length in range(KEY_CHARACTERS - 20, KEY_CHARACTERS + 20):
        for end in ("", "é", "🌍", "\ud83d", "\n", '"', "\\"):
            for parts in (False, True):
                text = "a" * length + end + "b"
                value = [{"text": text[:200]}, {"text": text[200:]}] if parts else text
                assert_equal_fields(json.dumps({"prompt": value}).encode())
                assert_equal_fields(json.dumps({"prompt": value}, ensure_ascii=False).encode("utf-8", "surrogatepass"))


def test_values_of_many_lengths() -> None:
    for length in [*range(80), *range(1000, 1050)]:
        for character in ("a", "é", '"'):
            assert_equal_fields(json.dumps({"model": character * length, "user": character * length}).encode())


@pytest.mark.parametrize("opening", ["[", '{"a":', '{"text":', '[{"content":'])
@pytest.mark.parametrize("depth", [1, 2, 3, 4, 5, 6, 100, 127, 128, 129, 253, 254, 255, 256, 257, 300, 5000, 100_000])
def test_deep_nesting(opening: str, depth: int) -> None:
    closing = opening.translate({ord("["): "]", ord("{"): "}"})
    closing = "".join(character for character in reversed(closing) if character in "]}")
    for name in ("prompt", "other"):
        assert_equal_fields(f'{{"model":"m","{name}":{opening * depth}"x"{closing * depth}}}'.encode())
        assert_equal_fields(f'{{"model":"m","{name}":{opening * depth}'.encode())


def test_chats() -> None:
    assert_equal_fields_of_chats(small_chats())


@pytest.mark.data
def test_public_chats(data_dir: Path) -> None:
    assert_equal_fields_of_chats([*public_chats(data_dir), *agent_chats(data_dir)])


def assert_equal_fields_of_chats(chats: list[dict[str, Any]]) -> None:
    for body in chats:
        for ascii_only in (True, False):
            data = json.dumps({"model": "m", **body}, ensure_ascii=ascii_only).encode()
            assert scanned_fields(data) is not None
            assert_equal_fields(data)
    assert len(chats) > 100
