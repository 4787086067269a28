"""The reference for `read_usage` of `_kernel/usage.c`, in Python. A property test compares the two."""

from __future__ import annotations

import re
from typing import Final

from warmroute._kernel import USAGE_TAIL_BYTES

_NUMBER: Final = re.compile(
    rb'"(prompt_tokens|input_tokens|cached_tokens|cache_read_input_tokens|cache_creation_input_tokens|completion_tokens|'
    rb'output_tokens)"\s*:\s*([0-9]{1,9})\b'
)
_CHUNK_BOUNDARY: Final = re.compile(rb"\r\n[0-9A-Fa-f]{1,8}\r\n")
"""The bytes between two chunks of a response, which may split a usage."""


def read_usage(last_bytes: bytes) -> tuple[int | None, int | None, int | None] | None:
    """Return the prompt, cached and output tokens; None if there is no usage."""
    last_bytes = _CHUNK_BOUNDARY.sub(b"", last_bytes[-USAGE_TAIL_BYTES:])
    at = last_bytes.rfind(b'"usage"')
    if at < 0:
        return None
    numbers: dict[bytes, bytes] = {}
    for name, number in _NUMBER.findall(last_bytes, at):
        numbers.setdefault(name, number)
    prompt, cached = _number(numbers, b"prompt_tokens", b"input_tokens"), _number(numbers, b"cached_tokens")
    read, created = _number(numbers, b"cache_read_input_tokens"), _number(numbers, b"cache_creation_input_tokens")
    if read is not None or created is not None:
        cached = read
        if prompt is not None:
            prompt += (read or 0) + (created or 0)
    return prompt, cached, _number(numbers, b"completion_tokens", b"output_tokens")


def _number(numbers: dict[bytes, bytes], *names: bytes) -> int | None:
    return next((int(numbers[name]) for name in names if name in numbers), None)
