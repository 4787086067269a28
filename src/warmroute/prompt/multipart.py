"""Find the `model` field of a multipart form (audio transcriptions) without parsing the files in it."""

from __future__ import annotations

import re
from typing import Final

_BOUNDARY: Final = re.compile(rb';[ \t]*boundary=(?:"([^"\r\n]{1,200})"|([^\s;",]{1,200}))', re.IGNORECASE)
_DISPOSITION: Final = re.compile(
    rb"^content-disposition:[ \t]*form-data[ \t]*((?:;[^\r\n]*)?)\r?$", re.IGNORECASE | re.MULTILINE
)
_PARAMETER: Final = re.compile(rb';[ \t]*([^\s=;"]+)=(?:"((?:[^"\\]|\\.)*)"|([^;\s]*))[ \t]*')
_DELIMITER_END: Final = re.compile(rb"(?:--)?[ \t]*(?:\r\n|\Z)")
_JSON: Final = b"application/json"
"""The type of nearly all bodies, so it is tested first."""
MAX_PARTS: Final = 100


def is_multipart_form(content_type: bytes) -> bool:
    return content_type != _JSON and content_type[:20].lower().startswith(b"multipart/form-data")


def form_model(content_type: bytes, body: bytes) -> str:
    """Return the form's `model` field; empty where there is none."""
    match = _BOUNDARY.search(content_type)
    if match is None:
        return ""
    delimiter = b"\r\n--" + (match[1] or match[2])
    start = len(delimiter) - 2 if body.startswith(delimiter[2:]) else _find_delimiter(body, delimiter, 0)[1]
    for _part in range(MAX_PARTS):
        if start < 0 or body.startswith(b"--", start):
            break
        stop, next_start = _find_delimiter(body, delimiter, start)
        head_end = body.find(b"\r\n\r\n", start, stop)
        if head_end >= 0 and _field_name(body[start:head_end]) == b"model":
            return body[head_end + 4 : min(stop, head_end + 1004)].decode("utf-8", "replace").strip()
        start = next_start
    return ""


def _find_delimiter(body: bytes, delimiter: bytes, start: int) -> tuple[int, int]:
    """Return start and end of the next delimiter; (end of the body, -1) where there is none.

    A delimiter is a whole line: a line that only starts with the boundary belongs to the part.
    """
    at = body.find(delimiter, start)
    while at >= 0:
        end = at + len(delimiter)
        if _DELIMITER_END.match(body, end):
            return at, end
        at = body.find(delimiter, end)
    return len(body), -1


def _field_name(head: bytes) -> bytes:
    disposition = _DISPOSITION.search(head)
    for name, quoted, plain in _PARAMETER.findall(disposition[1]) if disposition else ():
        if name.lower() == b"name":
            return bytes(quoted or plain)
    return b""
