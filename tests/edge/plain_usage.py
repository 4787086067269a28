"""What `read_usage` of `_kernel/_http.c` does, in plain Python: the reference that a property test holds it to."""

from __future__ import annotations

import re
from typing import Final

USAGE_BYTES: Final = 16_384
_NUMBER: Final = re.compile(
    rb'"(prompt_tokens|input_tokens|cached_tokens|cache_read_input_tokens|cache_creation_input_tokens|completion_tokens|'
    rb'output_tokens)"\s*:\s*([0-9]{1,9})\b'
)
_SEAM: Final = re.compile(rb"\r\n[0-9A-Fa-f]{1,8}\r\n")
"""Between two chunks of an answer, which may part a usage."""


def usage_of(last_bytes: bytes) -> tuple[int | None, int | None, int | None] | None:
    """None where there is no usage in them."""
    last_bytes = _SEAM.sub(b"", last_bytes[-USAGE_BYTES:])
    at = last_bytes.rfind(b'"usage"')
    if at < 0:
        return None
    told: dict[bytes, bytes] = {}
    for name, number in _NUMBER.findall(last_bytes, at):
        told.setdefault(name, number)
    prompt, cached = _number(told, b"prompt_tokens", b"input_tokens"), _number(told, b"cached_tokens")
    read, created = _number(told, b"cache_read_input_tokens"), _number(told, b"cache_creation_input_tokens")
    if read is not None or created is not None:
        cached = read
        if prompt is not None:
            prompt += (read or 0) + (created or 0)
    return prompt, cached, _number(told, b"completion_tokens", b"output_tokens")


def _number(told: dict[bytes, bytes], *names: bytes) -> int | None:
    return next((int(told[name]) for name in names if name in told), None)
