"""Find the `model` field of a multipart form (audio transcriptions), and fields that only the router may set,
without parsing the files in it.

The form is read strictly: parsers differ in text before the first boundary, in lines that only start with the
boundary, in fields given twice, in folded headers, in escaped names, and in text that is not UTF-8. A form with
any of these is rejected.
"""

from __future__ import annotations

import re
from typing import Final

from warmroute._kernel import ENGINE_FIELDS, ENGINE_OPTIONS, BadBody, is_utf8, outline_body

MAX_PARTS: Final = 100
"""A form of a transcription has about ten parts."""
MAX_HEAD_BYTES: Final = 8192
"""Maximum size of the headers of a part."""
_MAX_MODEL_BYTES: Final = 1024
"""The name of a model ends up in logs and metrics."""
_WINDOW_BYTES: Final = 4 << 20
"""A search in a large body is done in steps of this size, so that it never holds the interpreter lock for long."""
_TOKEN: Final = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"
_HEADER_NAME: Final = re.compile(_TOKEN)
_HEADER_VALUE: Final = re.compile(rb"[\t\x20-\x7e\x80-\xff]*")
_QUOTED: Final = rb'"((?:[\t\x20-!#-\[\]-~\x80-\xff]|\\(?!"))*)"'
"""A quoted value without escaped quotes, which parsers read differently."""
_PARAMETER: Final = re.compile(rb"[ \t]*;[ \t]*(" + _TOKEN + rb")=(?:(" + _TOKEN + rb")|" + _QUOTED + rb")")
_FORM_DATA: Final = b"form-data"
_PLAIN_ENCODINGS: Final = (b"7bit", b"8bit", b"binary")


_SEPARATORS: Final = re.compile(r"[\[\].]+")
"""Separators between the parts of a name such as `vllm_xargs[a]`, with which some clients write nested fields."""
MAX_NAME_PARTS: Final = 16
"""Names that are nested more deeply are refused, not searched."""


class BadForm(ValueError):
    """The form is malformed or ambiguous. The message says why, without the form's content."""


def form_fields(boundary: bytes, body: bytes) -> tuple[str, str | None]:
    """Return the form's `model` field, empty where there is none, and the name of a field that only the router may set
    (ENGINE_FIELDS). Raises BadForm."""
    delimiter = b"\r\n--" + boundary
    if not body.startswith(delimiter[2:]):
        raise BadForm("it does not start with its boundary")
    model: str | None = None
    engine_field: str | None = None
    at = len(delimiter) - 2
    for _part in range(MAX_PARTS + 1):
        if body.startswith(b"--", at):
            if body[at + 2 : at + 5] not in (b"", b"\r\n"):
                raise BadForm("bytes follow its end")
            return model or "", engine_field
        if not body.startswith(b"\r\n", at):
            raise BadForm("a line starts with the boundary and continues")
        start = at + 2
        head_end = body.find(b"\r\n\r\n", start, start + MAX_HEAD_BYTES)
        end = _find(body, delimiter, max(start, head_end))
        if head_end < 0 or end < 0:
            raise BadForm("a part does not end, or its headers are too long")
        if not is_utf8(body, start, head_end):
            raise BadForm("the headers of a part are not UTF-8 text")
        name, is_file = _read_part_head(body[start:head_end])
        if not is_file and not is_utf8(body, head_end + 4, end):
            raise BadForm("a field that is no file is not UTF-8 text")
        if name == b"model":
            if model is not None or is_file:
                raise BadForm("the field `model` is given twice, or is a file")
            if end - head_end > _MAX_MODEL_BYTES:
                raise BadForm("the field `model` is too long")
            model = body[head_end + 4 : end].decode()
        elif engine_field is None:
            engine_field = _engine_field(name.decode(), body, head_end + 4, end)
        at = end + len(delimiter)
    raise BadForm(f"it has more than {MAX_PARTS} parts")


def _engine_field(name: str, body: bytes, start: int, end: int) -> str | None:
    parts = _SEPARATORS.split(name, MAX_NAME_PARTS)
    if len(parts) > MAX_NAME_PARTS:
        raise BadForm("a field's name has too many parts")
    for part in parts:
        if part in ENGINE_FIELDS:
            return part
    options = next((part for part in parts if part in ENGINE_OPTIONS), None)
    if options is None or start == end:
        return None
    try:
        return outline_body(b'{"%b":%b}' % (options.encode(), body[start:end])).engine_field
    except BadBody:
        raise BadForm(f"the field `{options}` is not JSON") from None


def _find(body: bytes, delimiter: bytes, start: int) -> int:
    while start < len(body):
        found = body.find(delimiter, start, start + _WINDOW_BYTES + len(delimiter))
        if found >= 0:
            return found
        start += _WINDOW_BYTES
    return -1


def _read_part_head(head: bytes) -> tuple[bytes, bool]:
    """Return the name of a part, and whether it is a file. Raises BadForm."""
    disposition = None
    for line in head.split(b"\r\n"):
        key, colon, value = line.partition(b":")
        if not colon or not _HEADER_NAME.fullmatch(key) or not _HEADER_VALUE.fullmatch(value):
            raise BadForm("a part has a malformed header")
        key, value = key.lower(), value.strip(b" \t")
        if key == b"content-disposition":
            if disposition is not None:
                raise BadForm("a part has two `Content-Disposition` headers")
            disposition = value
        elif key == b"content-transfer-encoding" and value.lower() not in _PLAIN_ENCODINGS:
            raise BadForm("a part is encoded")
    parameters = _read_disposition(disposition) if disposition is not None else {}
    if b"name" not in parameters or b"\\" in parameters[b"name"]:
        raise BadForm("a part has no name, or one with a backslash")
    return parameters[b"name"], len(parameters) > 1


def _read_disposition(value: bytes) -> dict[bytes, bytes]:
    at = len(_FORM_DATA)
    parameters: dict[bytes, bytes] = {}
    while (found := _PARAMETER.match(value, at)) is not None:
        at = found.end()
        key = found[1].lower()
        if key in parameters or key not in (b"name", b"filename", b"filename*"):
            raise BadForm("a part has a malformed `Content-Disposition` header")
        parameters[key] = found[2] or found[3]
    if at != len(value) or value[: len(_FORM_DATA)].lower() != _FORM_DATA:
        raise BadForm("a part has a malformed `Content-Disposition` header")
    return parameters
