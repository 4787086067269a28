"""The `model` field of a multipart form (audio transcriptions), found without touching the files beside it."""

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
"""What nearly all bodies are, and what is told at a glance."""
MAX_PARTS: Final = 100


def is_multipart(content_type: bytes) -> bool:
    return content_type != _JSON and content_type[:20].lower().startswith(b"multipart/form-data")


def model_of(content_type: bytes, body: bytes) -> str:
    """The form's `model`; empty where there is none."""
    match = _BOUNDARY.search(content_type)
    if match is None:
        return ""
    mark = b"\r\n--" + (match[1] or match[2])
    start = len(mark) - 2 if body.startswith(mark[2:]) else _delimiter(body, mark, 0)[1]
    for _part in range(MAX_PARTS):
        if start < 0 or body.startswith(b"--", start):
            break
        stop, next_start = _delimiter(body, mark, start)
        head_end = body.find(b"\r\n\r\n", start, stop)
        if head_end >= 0 and _name(body[start:head_end]) == b"model":
            return body[head_end + 4 : min(stop, head_end + 1004)].decode("utf-8", "replace").strip()
        start = next_start
    return ""


def _delimiter(body: bytes, mark: bytes, start: int) -> tuple[int, int]:
    """Where the next delimiter begins and ends; (end of the body, -1) where there is none.

    A delimiter is a line of its own: what only begins with the boundary belongs to the part.
    """
    at = body.find(mark, start)
    while at >= 0:
        end = at + len(mark)
        if _DELIMITER_END.match(body, end):
            return at, end
        at = body.find(mark, end)
    return len(body), -1


def _name(head: bytes) -> bytes:
    disposition = _DISPOSITION.search(head)
    for name, quoted, plain in _PARAMETER.findall(disposition[1]) if disposition else ():
        if name.lower() == b"name":
            return bytes(quoted or plain)
    return b""
