"""The scan in C and the real parser read every body alike; and what they read is what routing is promised."""

from __future__ import annotations

import codecs
import gzip
import json
import random
import string
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from warmroute._kernel._scan import scan
from warmroute.prompt.routing_request import KEY_CHARACTERS, NotJson, RoutingRequest, read_json, read_json_plainly

CHATS = Path(__file__).parents[3] / "shared/data/chats"
Reading = tuple[str, bytes | None, bytes] | None


def reading(read: Callable[[bytes], RoutingRequest], body: bytes) -> Reading:
    try:
        ask = read(body)
    except NotJson:
        return None
    return ask.model, ask.prefix_key(), ask.session()


def hold_equal(body: bytes) -> None:
    fast, plain = reading(read_json, body), reading(read_json_plainly, body)
    if fast is not None and plain is None:
        # text that is passed over may be other than UTF-8; nothing else may be wrong
        assert not is_utf8(body), body
        mended = body.decode("utf-8", "replace_but_surrogates").encode("utf-8", "surrogatepass")
        plain = reading(read_json_plainly, mended)
    assert fast == plain, body


def replace_but_surrogates(error: UnicodeError) -> tuple[str | bytes, int]:
    try:
        return codecs.lookup_error("surrogatepass")(error)
    except UnicodeDecodeError:
        return codecs.lookup_error("replace")(error)


codecs.register_error("replace_but_surrogates", replace_but_surrogates)


def is_utf8(body: bytes) -> bool:
    try:
        body.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return False
    return True


# JSON texts, written in every way that there is.

BLANKS = st.sampled_from(["", "", "", " ", "\n", "\t", "\r\n", "\n    "])
PROMPTS = ["prompt", "input", "query", "text_1"]
SYSTEMS = ["system", "instructions"]
SESSIONS = ["session_id", "conversation_id", "prompt_cache_key", "user"]
FIELDS = [
    "model",
    "messages",
    "role",
    "content",
    "text",
    "type",
    *PROMPTS,
    *SYSTEMS,
    *SESSIONS,
    "Model",
    "model_",
    "mode",
]
CHARACTERS = st.one_of(
    st.sampled_from('"\\/\b\f\n\r\t\x00\x1f\x7f{}[]:,é你\U0001f600\ud83d\ude00\udc00\ud800\uffff'),
    st.sampled_from(string.ascii_letters + " "),
    st.characters(codec=None, exclude_categories=()),
)
TEXTS = st.builds(
    lambda characters, times, more: "".join(characters) * times + more,
    st.lists(CHARACTERS, max_size=20),
    st.sampled_from([1, 1, 2, 13, 40, 300]),
    st.text(max_size=5),
)


def as_escapes(text: str) -> str:
    units = text.encode("utf-16-be", "surrogatepass")
    return '"' + "".join(f"\\u{units[i : i + 2].hex()}" for i in range(0, len(units), 2)) + '"'


def as_raw(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("/", "\\/")


def strings(texts: st.SearchStrategy[str] = TEXTS) -> st.SearchStrategy[str]:
    ways: list[Callable[[str], str]] = [json.dumps, as_raw, as_raw]
    return st.builds(lambda text, way: way(text), texts, st.sampled_from(ways)) | texts.map(as_escapes)


NAMES = st.one_of(
    st.sampled_from(FIELDS).map(json.dumps), strings(st.sampled_from(FIELDS)), strings(st.text(max_size=8))
)
GOOD_NUMBERS = [
    "0",
    "-0",
    "-12",
    "1.5",
    "-0.0",
    "1e5",
    "1E+5",
    "2e-3",
    "9" * 30,
    "1e999",
    "NaN",
    "Infinity",
    "-Infinity",
]
BAD_NUMBERS = ["01", "-01", "1.", ".5", "1e", "1e+", "-", "+1", "0x1", "1_0", "--1", "1.e5", "tru", "nulll", "True"]
NUMBERS = st.sampled_from(GOOD_NUMBERS + BAD_NUMBERS)
SOUND_NUMBERS = st.integers().map(str) | st.floats(allow_nan=False, allow_infinity=False).map(json.dumps)
SCALARS = st.one_of(strings(), SOUND_NUMBERS, st.sampled_from(["null", "true", "false", '""']))


@st.composite
def arrays(draw: st.DrawFn, items: st.SearchStrategy[str], max_size: int = 4) -> str:
    blank = draw(BLANKS)
    return f"[{blank}{f'{blank},{blank}'.join(draw(st.lists(items, max_size=max_size)))}{blank}]"


@st.composite
def objects(draw: st.DrawFn, members: st.SearchStrategy[tuple[str, str]], max_size: int = 6) -> str:
    """Names may come twice."""
    blank = draw(BLANKS)
    written = [f"{name}{blank}:{blank}{value}" for name, value in draw(st.lists(members, max_size=max_size))]
    return f"{{{blank}{f'{blank},{blank}'.join(written)}{blank}}}"


def member(name: str, values: st.SearchStrategy[str]) -> st.SearchStrategy[tuple[str, str]]:
    return st.tuples(st.just(json.dumps(name)), values)


VALUES = st.recursive(SCALARS, lambda values: arrays(values) | objects(st.tuples(NAMES, values)), max_leaves=12)
PARTS = arrays(
    objects(
        member("text", strings())
        | member("type", strings(st.sampled_from(["text", "image_url"])))
        | member("content", VALUES)
        | member("image_url", VALUES)
        | st.tuples(NAMES, SCALARS),
        max_size=3,
    )
    | strings()
)
TOKENS = arrays(st.integers().map(str) | st.sampled_from(["true", "null", "1.5", "-0", "[1,2]"]), max_size=100)
CONTENTS = st.one_of(strings(), strings(), PARTS, TOKENS, VALUES)
ROLES = st.sampled_from(["user", "system", "developer", "assistant", "tool"])
MESSAGES = objects(
    st.one_of(
        member("role", ROLES.map(json.dumps)),
        member("role", ROLES.map(json.dumps)),
        member("content", CONTENTS),
        member("content", CONTENTS),
        member("role", strings(ROLES) | VALUES),
        st.tuples(NAMES, VALUES),
    ),
    max_size=4,
)
BODIES = objects(
    st.one_of(
        member("model", strings()),
        member("model", VALUES),
        member("messages", arrays(MESSAGES | VALUES)),
        member("messages", arrays(MESSAGES)),
        st.tuples(st.sampled_from(SYSTEMS).map(json.dumps), CONTENTS),
        st.tuples(st.sampled_from(PROMPTS).map(json.dumps), CONTENTS),
        st.tuples(st.sampled_from(SESSIONS).map(json.dumps), SCALARS),
        st.tuples(NAMES, VALUES),
    ),
    max_size=8,
).map(lambda text: text.encode("utf-8", "surrogatepass"))


def chat(*contents: str, **more: Any) -> dict[str, Any]:
    roles = ("system", "user", "assistant")
    messages = [{"role": roles[i] if i < 3 else roles[1 + (i - 1) % 2], "content": c} for i, c in enumerate(contents)]
    return {"model": "some/model-7b", "messages": messages, **more}


RICH = {
    **chat('Say "hé\\llo"\n' * 30, "Wörld 🌍 " * 40, "ok", "x" * 300),
    "tools": [{"type": "function", "function": {"name": "model", "parameters": {"messages": [{"role": "user"}]}}}],
    "temperature": -0.7e-3,
    "stop": None,
    "stream": True,
    "user": "ann\t1",
}
MULTIMODAL = {
    "model": "vl",
    "messages": [
        {"role": "developer", "content": [{"type": "text", "text": "Be brief."}]},
        {
            "content": [
                {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "iVBORw0KGgo" * 20}},
                {"type": "text", "text": "What is\u2028this?"},
            ],
            "role": "user",
        },
    ],
}
RESPONSES = {
    "model": "r",
    "instructions": "Be kind.",
    "input": [{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}],
    "prompt_cache_key": 12,
}
SAMPLES = [RICH, MULTIMODAL, RESPONSES, {"prompt": [1, 22, -3]}, {"input": ["a", "b"], "model": "e"}, {}]


# What is promised.


def test_the_key_is_the_model_and_both_beginnings() -> None:
    ask = read_json(json.dumps(chat("S" * 300, "é" * 300)).encode())
    assert ask.model == "some/model-7b"
    assert ask.prefix_key() == b"some/model-7b\0" + b"S" * KEY_CHARACTERS + b"\0" + "é".encode() * KEY_CHARACTERS


def test_the_key_follows_a_model_that_was_renamed() -> None:
    ask = read_json(json.dumps(chat("s", "u")).encode())
    ask.model = "alias"
    assert ask.prefix_key() == b"alias\0s\0u"


def test_a_header_names_the_session_before_the_body_does() -> None:
    ask = read_json(b'{"user":"ann"}')
    assert ask.session() == b"ann"
    ask.session_header = b"from-header"
    assert ask.session() == b"from-header"


def test_session_fields_go_by_rank_and_empty_ones_are_passed() -> None:
    assert read_json(b'{"user":"u","conversation_id":"c","session_id":""}').session() == b"c"
    assert read_json(b'{"user":7,"prompt_cache_key":null,"session_id":1.5}').session() == b"7"


def test_without_any_prompt_there_is_no_key() -> None:
    assert read_json(b'{"model":"m"}').prefix_key() is None
    assert read_json(b'{"model":"m","messages":[{"role":"user"}]}').prefix_key() == b"m\0\0"


def test_of_two_fields_with_one_name_the_last_counts() -> None:
    body = b'{"model":"a","messages":[{"role":"user","content":"1"}],"model":"b","messages":[{"role":"system"}]}'
    assert (read_json(body).model, read_json(body).prefix_key()) == ("b", b"b\0\0")
    hold_equal(body)


def test_names_nested_in_other_values_do_not_count() -> None:
    body = b'{"tools":[{"model":"no","messages":[]}],"messages":[{"role":"tool","content":[{"role":"user"}]}]}'
    assert read_json(body).model == ""
    assert read_json(body).prefix_key() is None


@pytest.mark.parametrize(
    "body", [b"", b" ", b"{", b"[]", b'"a"', b"{} {}", b'{"a":1,}', b"{'a':1}", b"\xff", b'{"a":\xa0}']
)
def test_what_is_no_object_is_refused_with_a_reason(body: bytes) -> None:
    with pytest.raises(NotJson, match=r"\w"):
        read_json(body)


def test_a_number_too_long_for_python_is_refused_and_not_a_crash() -> None:
    hold_equal(b'{"seed":%b}' % (b"9" * 5000))
    with pytest.raises(NotJson, match="digits"):
        read_json(b'{"seed":%b}' % (b"9" * 5000))


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: "-".join(sample) or "empty")
@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("ascii_only", [True, False])
def test_common_bodies_need_no_parser(sample: dict[str, Any], indent: int | None, ascii_only: bool) -> None:
    body = json.dumps(sample, ensure_ascii=ascii_only, indent=indent).encode()
    assert scan(body) is not None
    hold_equal(body)


def test_only_bytes_are_scanned() -> None:
    with pytest.raises(TypeError):
        scan("{}")  # type: ignore[arg-type]


# The scan against the parser.


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
def test_odd_bodies(body: bytes) -> None:
    hold_equal(body)


@pytest.mark.parametrize("number", GOOD_NUMBERS + BAD_NUMBERS)
def test_numbers(number: str) -> None:
    for text in (
        f'{{"a":{number}}}',
        f'{{"prompt":[{number} ]}}',
        f'{{"user":{number},"model":"m"}}',
        f'{{"a":{number}',
    ):
        hold_equal(text.encode())


@given(BODIES)
@settings(max_examples=300, deadline=None)
def test_generated_bodies(body: bytes) -> None:
    hold_equal(body)


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
    hold_equal(bytes(changed))


@given(st.one_of(VALUES, NUMBERS), BLANKS, st.one_of(st.just(""), VALUES))
@settings(max_examples=300, deadline=None)
def test_any_values(value: str, blank: str, behind: str) -> None:
    for text in (f"{blank}{value}{blank}{behind}", f'{{"model":{value}{blank}}}{behind}', f'{{"a":[{value},{value}]}}'):
        hold_equal(text.encode("utf-8", "surrogatepass"))


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: "-".join(sample) or "empty")
def test_bodies_cut_off_anywhere(sample: dict[str, Any]) -> None:
    for ascii_only in (True, False):
        body = json.dumps(sample, ensure_ascii=ascii_only).encode()
        for end in range(len(body)):
            assert scan(body[:end]) is None
        hold_equal(body[: len(body) // 2])


def test_every_byte_of_a_body_changed() -> None:
    rng = random.Random(7)
    for sample in SAMPLES[:3]:
        body = json.dumps(sample).encode()
        for at in range(len(body)):
            for byte in (*b'"\\u}]', rng.randrange(256)):
                hold_equal(body[:at] + bytes((byte,)) + body[at + 1 :])


def test_rows_of_backslashes_across_every_block() -> None:
    """A string is read by 16, 32 and 64 bytes; here rows begin at each place of them, with each ending."""
    for at in range(140):
        for row in (1, 2, 3, 4, 63, 64, 65):
            for behind in (b'"', b"n", b"u00e9", b"u00g9", b"x", b"\n", b""):
                text = b"a" * at + b"\\" * row + behind
                for rest in (b'"}', b"b" * 70 + b'"}'):
                    hold_equal(b'{"prompt":"' + text + rest)


def test_control_characters_and_quotes_at_every_place() -> None:
    for at in range(140):
        for byte in (0x00, 0x1F, 0x20, 0x21, 0x22, 0x23, 0x5C, 0x7F, 0x80, 0xC3, 0xFF):
            text = b"a" * at + bytes((byte,)) + b"b" * (139 - at)
            hold_equal(b'{"prompt":"' + text + b'"}')
            hold_equal(b'{"other":"' + text + b'"}')


def test_every_two_bytes_behind_a_backslash_or_quote() -> None:
    for one in range(256):
        hold_equal(b'{"prompt":"' + b"a" * 70 + b"\\" + bytes((one,)) + b"0041" + b"a" * 70 + b'"}')
        hold_equal(b'{"prompt":"\\u' + bytes((one,)) + b'041"}')
        hold_equal(b'{"prompt":"a"' + bytes((one,)) + b"}")
        for two in (0x00, 0x7F, 0x80, 0x9F, 0xA0, 0xBF, 0xC0):
            hold_equal(b'{"prompt":"' + bytes((one, two, 0x80, 0x80)) + b'"}')


def test_texts_that_end_about_the_limit() -> None:
    for length in range(KEY_CHARACTERS - 20, KEY_CHARACTERS + 20):
        for end in ("", "é", "🌍", "\ud83d", "\n", '"', "\\"):
            for parts in (False, True):
                text = "a" * length + end + "b"
                value = [{"text": text[:200]}, {"text": text[200:]}] if parts else text
                hold_equal(json.dumps({"prompt": value}).encode())
                hold_equal(json.dumps({"prompt": value}, ensure_ascii=False).encode("utf-8", "surrogatepass"))


def test_names_of_every_length() -> None:
    for length in [*range(80), *range(1000, 1050)]:
        for character in ("a", "é", '"'):
            hold_equal(json.dumps({"model": character * length, "user": character * length}).encode())


@pytest.mark.parametrize("opening", ["[", '{"a":', '{"text":', '[{"content":'])
@pytest.mark.parametrize("depth", [1, 2, 3, 4, 5, 6, 100, 127, 128, 129, 253, 254, 255, 256, 257, 300, 5000, 100_000])
def test_deep_nesting(opening: str, depth: int) -> None:
    closing = opening.translate({ord("["): "]", ord("{"): "}"})
    closing = "".join(character for character in reversed(closing) if character in "]}")
    for name in ("prompt", "other"):
        hold_equal(f'{{"model":"m","{name}":{opening * depth}"x"{closing * depth}}}'.encode())
        hold_equal(f'{{"model":"m","{name}":{opening * depth}'.encode())


def chats() -> Iterator[dict[str, Any]]:
    if not CHATS.is_dir():
        pytest.skip(f"there are no real chats at {CHATS}")
    for path in sorted(CHATS.glob("*.jsonl.gz")):
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            said: dict[str, str] = {}
            for line in lines:
                record = json.loads(line)
                if "messages" in record:
                    yield {"model": path.stem, **record}
                elif "append" in record:
                    session = record["session"]
                    said[session] = said.get(session, "")[: record["keep"]] + record["append"]
                    yield {"model": path.stem, "session_id": session, **chat("You help.", said[session])}


def test_real_chats() -> None:
    count = 0
    for body in chats():
        count += 1
        for ascii_only in (True, False):
            data = json.dumps(body, ensure_ascii=ascii_only).encode()
            assert scan(data) is not None
            hold_equal(data)
    assert count > 100
