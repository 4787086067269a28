"""Hypothesis strategies for JSON request bodies, written in every way that JSON allows, and sample bodies."""

from __future__ import annotations

import json
import string
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

WHITESPACE = st.sampled_from(["", "", "", " ", "\n", "\t", "\r\n", "\n    "])
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
    encodings: list[Callable[[str], str]] = [json.dumps, as_raw, as_raw]
    return st.builds(lambda text, encode: encode(text), texts, st.sampled_from(encodings)) | texts.map(as_escapes)


NAMES = st.one_of(
    st.sampled_from(FIELDS).map(json.dumps), strings(st.sampled_from(FIELDS)), strings(st.text(max_size=8))
)
ACCEPTED_NUMBERS = [
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
REFUSED_NUMBERS = ["01", "-01", "1.", ".5", "1e", "1e+", "-", "+1", "0x1", "1_0", "--1", "1.e5", "tru", "nulll", "True"]
NUMBERS = st.sampled_from(ACCEPTED_NUMBERS + REFUSED_NUMBERS)
VALID_NUMBERS = st.integers().map(str) | st.floats(allow_nan=False, allow_infinity=False).map(json.dumps)
SCALARS = st.one_of(strings(), VALID_NUMBERS, st.sampled_from(["null", "true", "false", '""']))


@st.composite
def arrays(draw: st.DrawFn, items: st.SearchStrategy[str], max_size: int = 4) -> str:
    space = draw(WHITESPACE)
    return f"[{space}{f'{space},{space}'.join(draw(st.lists(items, max_size=max_size)))}{space}]"


@st.composite
def objects(draw: st.DrawFn, members: st.SearchStrategy[tuple[str, str]], max_size: int = 6) -> str:
    """The same name may occur twice."""
    space = draw(WHITESPACE)
    fields = [f"{name}{space}:{space}{value}" for name, value in draw(st.lists(members, max_size=max_size))]
    return f"{{{space}{f'{space},{space}'.join(fields)}{space}}}"


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
