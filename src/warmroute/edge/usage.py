"""What an answer says of its tokens, found in its last bytes: OpenAI's usage (chat, completions, responses) and
Anthropic's, which counts as input only what was not cached. Quotes within a text are escaped in JSON, so nothing that a
model says can pass for it.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

_PROMPT: Final = re.compile(rb'"(?:prompt_tokens|input_tokens)"\s*:\s*([0-9]{1,9})\b')
_CACHED: Final = re.compile(rb'"cached_tokens"\s*:\s*([0-9]{1,9})\b')
_READ: Final = re.compile(rb'"cache_read_input_tokens"\s*:\s*([0-9]{1,9})\b')
_CREATED: Final = re.compile(rb'"cache_creation_input_tokens"\s*:\s*([0-9]{1,9})\b')
_OUTPUT: Final = re.compile(rb'"(?:completion_tokens|output_tokens)"\s*:\s*([0-9]{1,9})\b')
_SEAM: Final = re.compile(rb"\r\n[0-9A-Fa-f]{1,8}\r\n")
"""Between two chunks of an answer, which may part a usage."""


class Usage(NamedTuple):
    """None where the answer does not say."""

    prompt_tokens: int | None
    cached_tokens: int | None
    output_tokens: int | None


def usage_of(last_bytes: bytes) -> Usage | None:
    """None where there is no usage in them."""
    last_bytes = _SEAM.sub(b"", last_bytes)
    at = last_bytes.rfind(b'"usage"')
    if at < 0:
        return None
    prompt, cached = _number(_PROMPT, last_bytes, at), _number(_CACHED, last_bytes, at)
    read, created = _number(_READ, last_bytes, at), _number(_CREATED, last_bytes, at)
    if read is not None or created is not None:
        cached = read
        if prompt is not None:
            prompt += (read or 0) + (created or 0)
    return Usage(prompt, cached, _number(_OUTPUT, last_bytes, at))


def _number(pattern: re.Pattern[bytes], data: bytes, at: int) -> int | None:
    found = pattern.search(data, at)
    return int(found[1]) if found else None
