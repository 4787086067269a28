"""The form field `model` is read as python-multipart, Starlette's parser, reads it. Ambiguous forms are rejected."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from python_multipart import create_form_parser
from python_multipart.exceptions import FormParserError
from support.cpu_limit import cpu_limit

from warmroute.prompt.multipart import MAX_HEAD_BYTES, MAX_PARTS, BadForm, form_fields

BOUNDARY = b"1f2e3d4c5b6a79880123456789abcdef"
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


def model_of(body: bytes, boundary: bytes = BOUNDARY) -> str:
    return form_fields(boundary, body)[0]


def fields_by_python_multipart(body: bytes) -> list[tuple[bytes, bytes | None]]:
    """Return names and values of the form; the value of a file is None. Raises FormParserError."""
    found: list[tuple[bytes, bytes | None]] = []

    def on_field(field: Any) -> None:
        found.append((field.field_name, field.value))

    def on_file(file: Any) -> None:
        found.append((file.field_name, None))

    headers = {"Content-Type": b"multipart/form-data; boundary=" + BOUNDARY, "Content-Length": str(len(body)).encode()}
    parser = create_form_parser(headers, on_field, on_file)
    parser.write(body)
    parser.finalize()
    return found


def test_the_model_before_the_file() -> None:
    assert model_of(form(field(b"model", b"whisper-1"), file(b"ID3\0\xff\xfb"))) == "whisper-1"


def test_the_model_after_the_file() -> None:
    assert model_of(form(file(b"ID3\0\r\n\r\n\xff\xfb"), field(b"model", b"whisper-1"))) == "whisper-1"


def test_the_model_among_other_fields() -> None:
    others = [
        field(b"language", b"de"),
        field(b"prompt", b"model"),
        field(b"model_name", b"no"),
        field(b"Model", b"no"),
    ]
    assert model_of(form(*others, field(b"model", b"whisper-1"), file(b""))) == "whisper-1"


def test_a_form_without_a_model() -> None:
    assert model_of(form(file(b"x"))) == ""
    assert model_of(form()) == ""


def test_header_names_in_any_case_and_names_without_quotes() -> None:
    part = b"--" + BOUNDARY + b"\r\nContent-Type: text/plain\r\ncontent-disposition: form-data; name=model\r\n\r\nm\r\n"
    assert model_of(form(part)) == "m"


def test_a_file_that_contains_a_form_with_another_boundary() -> None:
    inner = form(field(b"model", b"fake", b"other"), boundary=b"other")
    assert model_of(form(file(inner), field(b"model", b"m"))) == "m"


def test_a_file_that_contains_the_boundary_within_a_line() -> None:
    assert model_of(form(file(b"x--" + BOUNDARY + FAKE), field(b"model", b"m"))) == "m"


def test_the_value_is_not_changed() -> None:
    assert model_of(form(field(b"model", b""), file(b"x"))) == ""
    assert model_of(form(field(b"model", b" m \n"))) == " m \n"
    assert model_of(form(field(b"model", "modèle".encode()))) == "modèle"


def test_a_filename_that_looks_like_a_name() -> None:
    part = b'--%b\r\nContent-Disposition: form-data; filename="; name=model"; name="file"\r\n\r\nfake\r\n' % BOUNDARY
    assert model_of(form(part, field(b"model", b"m"))) == "m"


def test_a_filename_may_be_a_windows_path_or_not_ascii() -> None:
    for filename in (b"C:\\speech\\a.mp3", "größe.mp3".encode(), b"a%22b.mp3"):
        body = form(file(b"x", filename=filename), field(b"model", b"m"))
        assert model_of(body) == "m"
        assert fields_by_python_multipart(body) == [(b"file", None), (b"model", b"m")]


def test_a_large_file_is_searched_to_its_end() -> None:
    content = (b"\r\n--" + BOUNDARY[:-1]) * 250_000
    assert len(content) > 8 << 20
    for shift in range(3):
        assert model_of(form(file(b"x" * shift + content), field(b"model", b"m"))) == "m"


def with_disposition(*lines: bytes) -> bytes:
    return form(b"--" + BOUNDARY + b"\r\n" + b"\r\n".join(lines) + b"\r\n\r\nm\r\n", file(b"x"))


AMBIGUOUS = {
    "a preamble": b"This is a form.\r\n" + form(field(b"model", b"m")),
    "an empty line before it": b"\r\n" + form(field(b"model", b"m")),
    "no boundary": b'{"model": "m"}',
    "an empty body": b"",
    "two models": form(field(b"model", b"a"), field(b"model", b"b")),
    "two equal models": form(field(b"model", b"a"), field(b"model", b"a")),
    "a model that is a file": form(file(b"m").replace(b'name="file"', b'name="model"', 1)),
    "a model that is not UTF-8": form(field(b"model", b"\xff")),
    "a name that is not UTF-8": form(field(b"model", b"m"), field(b"\xff", b"x")),
    "a file name that is not UTF-8": form(field(b"model", b"m"), file(b"x", filename=b"\xe2\x82")),
    "a field that is not UTF-8": form(field(b"model", b"m"), field(b"prompt", b"x" * 9999 + b"\xc3")),
    "a long model": form(field(b"model", b"m" * 1100)),
    "a longer boundary in a file": form(file(b"\r\n--" + BOUNDARY + b"0" + FAKE), field(b"model", b"m")),
    "spaces after a boundary": form(field(b"model", b"m")).replace(BOUNDARY + b"\r\n", BOUNDARY + b" \r\n"),
    "a boundary that ends in LF": form(field(b"model", b"m")).replace(BOUNDARY + b"\r\n", BOUNDARY + b"\n"),
    "bytes after its end": form(file(b"x")) + b"--" + BOUNDARY + FAKE,
    "one byte after its end": form(file(b"x"))[:-2] + b"x",
    "no end": field(b"model", b"m"),
    "a last line without hyphens": field(b"model", b"m") + b"--" + BOUNDARY + b"\r\n",
    "a part without headers": form(b"--" + BOUNDARY + b"\r\n\r\nm\r\n"),
    "no name": with_disposition(b"Content-Disposition: form-data; filename=model"),
    "two names": with_disposition(b'Content-Disposition: form-data; name="model"; name="other"'),
    "an extended name": with_disposition(b"Content-Disposition: form-data; name*=utf-8''model"),
    "a continued name": with_disposition(b'Content-Disposition: form-data; name*0="mod"; name*1="el"'),
    "a name with a backslash": with_disposition(b'Content-Disposition: form-data; name="mo\\del"'),
    "a quote after a backslash": with_disposition(rb'Content-Disposition: form-data; filename="a\"; name="model"'),
    "another parameter": with_disposition(b'Content-Disposition: form-data; name="model"; x=y'),
    "another disposition": with_disposition(b'Content-Disposition: attachment; name="model"'),
    "two dispositions": with_disposition(
        b'Content-Disposition: form-data; name="model"', b'Content-Disposition: form-data; name="other"'
    ),
    "no disposition": with_disposition(b"Content-Type: text/plain"),
    "a folded header": with_disposition(b"Content-Disposition: form-data;", b' name="model"'),
    "a bare LF in a header": with_disposition(b'A: b\nContent-Disposition: form-data; name="model"'),
    "a space before the colon": with_disposition(b'Content-Disposition : form-data; name="model"'),
    "an encoded part": with_disposition(
        b'Content-Disposition: form-data; name="model"', b"Content-Transfer-Encoding: base64"
    ),
    "long headers": with_disposition(b'Content-Disposition: form-data; name="model"', b"A: " + b"b" * MAX_HEAD_BYTES),
    "too many parts": form(*[field(b"a", b"b")] * MAX_PARTS, field(b"model", b"m")),
}


@pytest.mark.parametrize("body", AMBIGUOUS.values(), ids=AMBIGUOUS)
def test_an_ambiguous_form_is_rejected(body: bytes) -> None:
    with pytest.raises(BadForm, match=r"\w"):
        model_of(body)


def test_a_form_may_have_100_parts() -> None:
    assert model_of(form(*[field(b"a", b"b")] * (MAX_PARTS - 1), field(b"model", b"m"))) == "m"


def test_a_truncated_form_is_rejected() -> None:
    body = form(file(b"ID3" + FAKE), field(b"model", b"whisper-1"), field(b"language", b"de"))
    for end in range(len(body) - 2):
        with pytest.raises(BadForm):
            model_of(body[:end])


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_any_files_around_the_model(before: bytes, after: bytes) -> None:
    assert model_of(form(file(before), field(b"model", b"m"), file(after))) == "m"


PIECES = st.sampled_from(
    [
        b"--" + BOUNDARY, b"\r\n--" + BOUNDARY, b"--", b"\r\n", b"\r", b"\n", b"Content-Disposition: form-data; ",
        b'name="model"', b"name=model", b'; filename="f"', b"\r\n\r\n", b"m", b"other", b" ", b"\t", b";", b'"',
        field(b"model", b"a"), field(b"model", b"b"), field(b"other", b"c"), file(b"d"), form(), b"\\", b"*",
    ]
)  # fmt: skip


@settings(max_examples=1500, deadline=None)
@given(st.lists(PIECES, max_size=6).map(b"".join), st.binary(max_size=40))
def test_python_multipart_reads_the_same_model_in_what_is_accepted(pieces: bytes, noise: bytes) -> None:
    for body in (
        pieces,
        form(pieces),
        form(field(b"model", b"m"), pieces),
        form(pieces, field(b"model", noise)),
        noise,
    ):
        try:
            model = model_of(body)
        except BadForm:
            continue
        try:
            fields = fields_by_python_multipart(body)
        except FormParserError:
            continue  # the engine refuses it
        assert [value for name, value in fields if name == b"model"] in ([model.encode()], [] if not model else None)


def test_python_multipart_reads_common_forms() -> None:
    body = form(field(b"model", b"m"), file(b"\0\xff\r\n--x"), field(b"language", "é".encode()))
    assert fields_by_python_multipart(body) == [(b"model", b"m"), (b"file", None), (b"language", "é".encode())]


@pytest.mark.parametrize(
    "header",
    [
        b"A:" + b" " * 8000 + b"\x01",
        b"A:x" + b" " * 8000 + b"x",
        b"A" * 8000,
        b"Content-Disposition: form-data" + b"; " * 4000,
        b"Content-Disposition: form-data" + b"; a=b" * 1600 + b"(",
        b'Content-Disposition: form-data; name="' + b"\\a" * 4000,
    ],
)
def test_a_header_is_read_in_time_that_grows_with_its_length(header: bytes) -> None:
    with cpu_limit(2.0), contextlib.suppress(BadForm):
        for _ in range(20):
            model_of(form(b"--%b\r\n%b\r\n\r\nx\r\n" % (BOUNDARY, header[: MAX_HEAD_BYTES - 10])))


def test_a_name_with_very_many_parts_is_rejected() -> None:
    """Each part of each name is compared with names of engine fields."""
    assert model_of(form(field(b"a[b][c][d]", b"1"), field(b"model", b"m"))) == "m"
    with pytest.raises(BadForm):
        form_fields(BOUNDARY, form(field(b"a" + b".b" * 4000, b"1")))
