"""The `model` field of a multipart form (audio transcriptions), found without touching the files beside it."""

from __future__ import annotations

import re
from typing import Final

_BOUNDARY: Final = re.compile(rb'boundary=(?:"([^"\r\n]{1,200})"|([^\s;",]{1,200}))', re.IGNORECASE)
_NAME: Final = re.compile(rb'content-disposition:[^\r\n]*?[;\s]name="?([^";\r\n]*)"?', re.IGNORECASE)
MAX_PARTS: Final = 100


def is_multipart(content_type: bytes) -> bool:
    return content_type[:20].lower().startswith(b"multipart/form-data")


def model_of(content_type: bytes, body: bytes) -> str:
    """The form's `model`; empty where there is none."""
    match = _BOUNDARY.search(content_type)
    if match is None:
        return ""
    mark = b"--" + (match[1] or match[2])
    at = 0 if body.startswith(mark) else body.find(b"\r\n" + mark)
    for _part in range(MAX_PARTS):
        if at < 0:
            break
        head_start = body.find(mark, at) + len(mark)
        head_end = body.find(b"\r\n\r\n", head_start)
        if head_end < 0:
            break
        end = body.find(b"\r\n" + mark, head_end + 2)
        name = _NAME.search(body, head_start, head_end)
        if name is not None and name[1] == b"model":
            value = body[head_end + 4 : end if end >= 0 else len(body)]
            return value[:1000].decode("utf-8", "replace").strip()
        at = end
    return ""
