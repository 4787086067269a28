"""The form field `model`, in valid and in broken forms."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmroute.prompt.multipart import MAX_PARTS, form_model, is_multipart_form

BOUNDARY = b"1f2e3d4c5b6a79880123456789abcdef"
TYPE = b"multipart/form-data; boundary=" + BOUNDARY
FAKE = b'\r\nContent-Disposition: form-data; name="model"\r\n\r\nfake\r\n'


def field(name: bytes, value: bytes, boundary: bytes = BOUNDARY) -> bytes:
    return b'--%b\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n' % (boundary, name, value)


def file(content: bytes, boundary: bytes = BOUNDARY, filename: bytes = b"speech.mp3") -> bytes:
    return (
        b'--%b\r\nContent-Disposition: form-data; name="file"; filename="%b"\r\nContent-Type: audio/mpeg\r\n\r\n%b\r\n'
        % (boundary, filename, content)
    )


def form(*parts: bytes, boundary: bytes = BOUNDARY) -> bytes:
    return b"".join(parts) + b"--" + boundary + b"--\r\n"


def test_a_form_is_recognised_by_its_content_type() -> None:
    assert is_multipart_form(TYPE)
    assert is_multipart_form(b"Multipart/Form-Data;boundary=x")
    assert not is_multipart_form(b"application/json")
    assert not is_multipart_form(b"")


def test_the_model_before_the_file() -> None:
    assert form_model(TYPE, form(field(b"model", b"whisper-1"), file(b"ID3\0\xff\xfb"))) == "whisper-1"


def test_the_model_after_the_file() -> None:
    assert form_model(TYPE, form(file(b"ID3\0\r\n\r\n\xff\xfb"), field(b"model", b"whisper-1"))) == "whisper-1"


def test_the_model_among_other_fields() -> None:
    others = [
        field(b"language", b"de"),
        field(b"prompt", b"model"),
        field(b"model_name", b"no"),
        field(b"Model", b"no"),
    ]
    assert form_model(TYPE, form(*others, field(b"model", b"whisper-1"), file(b""))) == "whisper-1"


@pytest.mark.parametrize(
    "content_type",
    [
        b'multipart/form-data; boundary="a b:c"',
        b'multipart/form-data; charset=utf-8; Boundary="a b:c"',
        b'multipart/form-data;boundary="a b:c"; charset=utf-8',
    ],
)
def test_a_boundary_in_quotes(content_type: bytes) -> None:
    assert form_model(content_type, form(field(b"model", b"m", b"a b:c"), boundary=b"a b:c")) == "m"


def test_a_boundary_followed_by_a_parameter() -> None:
    assert form_model(TYPE + b"; charset=utf-8", form(field(b"model", b"m"))) == "m"


def test_a_preamble_is_skipped() -> None:
    assert form_model(TYPE, b"This is a form.\r\n" + form(field(b"model", b"m"))) == "m"


def test_header_names_in_any_case_and_names_without_quotes() -> None:
    part = b"--" + BOUNDARY + b"\r\nContent-Type: text/plain\r\ncontent-disposition: form-data; name=model\r\n\r\nm\r\n"
    assert form_model(TYPE, form(part)) == "m"


def test_a_file_that_contains_a_form_with_another_boundary() -> None:
    inner = form(field(b"model", b"fake", b"other"), boundary=b"other")
    assert form_model(TYPE, form(file(inner), field(b"model", b"m"))) == "m"


def test_a_file_that_contains_the_boundary_within_a_line() -> None:
    assert form_model(TYPE, form(file(b"x--" + BOUNDARY + FAKE), field(b"model", b"m"))) == "m"


def test_a_file_named_model_is_not_the_model() -> None:
    assert form_model(TYPE, form(file(b"no", filename=b"model"))) == ""


def test_an_empty_model_and_one_with_whitespace() -> None:
    assert form_model(TYPE, form(field(b"model", b""), file(b"x"))) == ""
    assert form_model(TYPE, form(field(b"model", b" m \n"))) == "m"


def test_a_model_beyond_ascii() -> None:
    assert form_model(TYPE, form(field(b"model", "modèle".encode()))) == "modèle"
    assert form_model(TYPE, form(field(b"model", b"\xff"))) == "\ufffd"


@pytest.mark.parametrize("content_type", [b"multipart/form-data", b"multipart/form-data; boundary=", b""])
def test_without_a_boundary_there_is_no_model(content_type: bytes) -> None:
    assert form_model(content_type, form(field(b"model", b"m"))) == ""


def test_parts_after_the_limit_are_not_read() -> None:
    many = [field(b"a", b"b")] * MAX_PARTS
    assert form_model(TYPE, form(*many[1:], field(b"model", b"m"))) == "m"
    assert form_model(TYPE, form(*many, field(b"model", b"m"))) == ""


def test_a_truncated_form_gives_the_model_or_its_start() -> None:
    body = form(file(b"ID3" + FAKE), field(b"model", b"whisper-1"), field(b"language", b"de"))
    for end in range(len(body)):
        # the start of the last delimiter may count as a part of the value; the proxy refuses such a short body anyway
        assert form_model(TYPE, body[:end]).partition("\r\n")[0] in {"whisper-1"[:n] for n in range(10)}


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_any_files_around_the_model(before: bytes, after: bytes) -> None:
    assert form_model(TYPE, form(file(before), field(b"model", b"m"), file(after))) == "m"


@given(st.binary(max_size=60), st.binary(max_size=300))
def test_any_bytes_are_read_without_an_error(content_type: bytes, body: bytes) -> None:
    form_model(content_type, body)
    form_model(TYPE, b"--" + BOUNDARY + body)


# Forms that a simpler reader would read differently from the engine.


def test_a_file_that_contains_a_longer_boundary() -> None:
    assert form_model(TYPE, form(file(b"\r\n--" + BOUNDARY + b"0" + FAKE), field(b"model", b"m"))) == "m"


def test_bytes_after_the_form_are_not_read() -> None:
    assert form_model(TYPE, form(file(b"x")) + b"--" + BOUNDARY + FAKE) == ""


def test_a_filename_that_looks_like_a_name() -> None:
    part = b'--%b\r\nContent-Disposition: form-data; filename="; name=model"; name="file"\r\n\r\nfake\r\n' % BOUNDARY
    assert form_model(TYPE, form(part, field(b"model", b"m"))) == "m"
