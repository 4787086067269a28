"""The form field `model`, in forms as clients write them and as they might be broken."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmroute.prompt.multipart import MAX_PARTS, is_multipart, model_of

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


def test_a_form_is_told_by_its_content_type() -> None:
    assert is_multipart(TYPE)
    assert is_multipart(b"Multipart/Form-Data;boundary=x")
    assert not is_multipart(b"application/json")
    assert not is_multipart(b"")


def test_the_model_before_the_file() -> None:
    assert model_of(TYPE, form(field(b"model", b"whisper-1"), file(b"ID3\0\xff\xfb"))) == "whisper-1"


def test_the_model_behind_the_file() -> None:
    assert model_of(TYPE, form(file(b"ID3\0\r\n\r\n\xff\xfb"), field(b"model", b"whisper-1"))) == "whisper-1"


def test_the_model_among_other_fields() -> None:
    others = [
        field(b"language", b"de"),
        field(b"prompt", b"model"),
        field(b"model_name", b"no"),
        field(b"Model", b"no"),
    ]
    assert model_of(TYPE, form(*others, field(b"model", b"whisper-1"), file(b""))) == "whisper-1"


@pytest.mark.parametrize(
    "content_type",
    [
        b'multipart/form-data; boundary="a b:c"',
        b'multipart/form-data; charset=utf-8; Boundary="a b:c"',
        b'multipart/form-data;boundary="a b:c"; charset=utf-8',
    ],
)
def test_a_boundary_in_quotes(content_type: bytes) -> None:
    assert model_of(content_type, form(field(b"model", b"m", b"a b:c"), boundary=b"a b:c")) == "m"


def test_a_boundary_with_a_parameter_behind_it() -> None:
    assert model_of(TYPE + b"; charset=utf-8", form(field(b"model", b"m"))) == "m"


def test_a_preamble_is_passed() -> None:
    assert model_of(TYPE, b"This is a form.\r\n" + form(field(b"model", b"m"))) == "m"


def test_header_names_in_any_case_and_names_without_quotes() -> None:
    part = b"--" + BOUNDARY + b"\r\nContent-Type: text/plain\r\ncontent-disposition: form-data; name=model\r\n\r\nm\r\n"
    assert model_of(TYPE, form(part)) == "m"


def test_a_file_that_holds_a_form_with_another_boundary() -> None:
    inner = form(field(b"model", b"fake", b"other"), boundary=b"other")
    assert model_of(TYPE, form(file(inner), field(b"model", b"m"))) == "m"


def test_a_file_that_holds_the_boundary_amid_a_line() -> None:
    assert model_of(TYPE, form(file(b"x--" + BOUNDARY + FAKE), field(b"model", b"m"))) == "m"


def test_a_file_called_model_is_no_model() -> None:
    assert model_of(TYPE, form(file(b"no", filename=b"model"))) == ""


def test_an_empty_model_and_one_with_blanks() -> None:
    assert model_of(TYPE, form(field(b"model", b""), file(b"x"))) == ""
    assert model_of(TYPE, form(field(b"model", b" m \n"))) == "m"


def test_a_model_beyond_ascii() -> None:
    assert model_of(TYPE, form(field(b"model", "modèle".encode()))) == "modèle"
    assert model_of(TYPE, form(field(b"model", b"\xff"))) == "\ufffd"


@pytest.mark.parametrize("content_type", [b"multipart/form-data", b"multipart/form-data; boundary=", b""])
def test_without_a_boundary_there_is_no_model(content_type: bytes) -> None:
    assert model_of(content_type, form(field(b"model", b"m"))) == ""


def test_parts_behind_the_limit_are_not_read() -> None:
    many = [field(b"a", b"b")] * MAX_PARTS
    assert model_of(TYPE, form(*many[1:], field(b"model", b"m"))) == "m"
    assert model_of(TYPE, form(*many, field(b"model", b"m"))) == ""


def test_a_form_cut_off_anywhere_gives_the_model_or_its_beginning() -> None:
    body = form(file(b"ID3" + FAKE), field(b"model", b"whisper-1"), field(b"language", b"de"))
    for end in range(len(body)):
        # the last line's beginning may be taken for the value's end; such a body is not as long as its head says
        assert model_of(TYPE, body[:end]).partition("\r\n")[0] in {"whisper-1"[:n] for n in range(10)}


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_any_file_beside_the_model(before: bytes, behind: bytes) -> None:
    assert model_of(TYPE, form(file(before), field(b"model", b"m"), file(behind))) == "m"


@given(st.binary(max_size=60), st.binary(max_size=300))
def test_any_bytes_are_read_without_an_error(content_type: bytes, body: bytes) -> None:
    model_of(content_type, body)
    model_of(TYPE, b"--" + BOUNDARY + body)


# Where it reads a form in another way than the engine behind it would.


def test_a_file_that_holds_a_longer_boundary() -> None:
    assert model_of(TYPE, form(file(b"\r\n--" + BOUNDARY + b"0" + FAKE), field(b"model", b"m"))) == "m"


def test_what_stands_behind_the_form_is_not_read() -> None:
    assert model_of(TYPE, form(file(b"x")) + b"--" + BOUNDARY + FAKE) == ""


def test_a_filename_that_looks_like_a_name() -> None:
    part = b'--%b\r\nContent-Disposition: form-data; filename="; name=model"; name="file"\r\n\r\nfake\r\n' % BOUNDARY
    assert model_of(TYPE, form(part, field(b"model", b"m"))) == "m"
