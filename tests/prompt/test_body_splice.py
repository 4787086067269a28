"""Fields are spliced into a body's bytes; all other bytes stay."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmroute._kernel import outline_body
from warmroute.prompt.request_body import splice

NAMES = st.sampled_from(["model", "stream", "max_tokens", "n", "kv_transfer_params", "stream_options", "x", "é", "a b"])
VALUES = st.recursive(st.none() | st.booleans() | st.integers(-9, 99) | st.text(max_size=5), st.lists, max_leaves=4)
SPLICED = st.dictionaries(st.sampled_from(["stream", "max_tokens", "kv_transfer_params", "new"]), VALUES)


@given(st.dictionaries(NAMES, VALUES), SPLICED, st.sampled_from([None, 1]), st.sampled_from(["", " \r\n\t"]))
def test_the_spliced_fields_have_their_new_values_and_the_others_theirs(
    fields: dict[str, Any], spliced: dict[str, Any], indent: int | None, space: str
) -> None:
    fields.pop("model", None), fields.pop("stream", None), fields.pop("max_tokens", None)
    body = (space + json.dumps(fields, indent=indent) + space).encode()
    changed = splice(body, outline_body(body), {name: json.dumps(value).encode() for name, value in spliced.items()})
    assert json.loads(changed) == {**fields, **spliced}


def test_bytes_stay_as_the_client_sent_them() -> None:
    body = b'{ "unknown" : 1.50 , "max_tokens":100,"s":"\\u00e9","stream"  :true }\n'
    changed = splice(body, outline_body(body), {"stream": b"false", "max_tokens": b"1", "more": b"{}"})
    assert changed == b'{ "unknown" : 1.50 , "max_tokens":1,"s":"\\u00e9","stream"  :false ,"more":{}}\n'


@pytest.mark.parametrize("body", [b"{}", b" { } "])
def test_an_empty_object_gets_no_comma(body: bytes) -> None:
    assert json.loads(splice(body, outline_body(body), {"a": b"1", "b": b"2"})) == {"a": 1, "b": 2}


def test_a_field_that_is_given_twice_gets_its_new_value() -> None:
    body = b'{"seed":1,"seed":2}'
    assert json.loads(splice(body, outline_body(body), {"seed": b"3"})) == {"seed": 3}
