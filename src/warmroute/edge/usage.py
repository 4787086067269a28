"""What an answer says of its tokens, found in its last bytes: OpenAI's usage (chat, completions, responses) and
Anthropic's. Quotes within a text are escaped in JSON, so nothing that a model says can pass for it.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

_PROMPT: Final = re.compile(rb'"(?:prompt_tokens|input_tokens)"\s*:\s*([0-9]{1,9})\b')
_CACHED: Final = re.compile(rb'"(?:cached_tokens|cache_read_input_tokens)"\s*:\s*([0-9]{1,9})\b')
_OUTPUT: Final = re.compile(rb'"(?:completion_tokens|output_tokens)"\s*:\s*([0-9]{1,9})\b')


class Usage(NamedTuple):
    """None where the answer does not say."""

    prompt_tokens: int | None
    cached_tokens: int | None
    output_tokens: int | None


def usage_of(last_bytes: bytes) -> Usage | None:
    """None where there is no usage in them."""
    at = last_bytes.rfind(b'"usage"')
    if at < 0:
        return None
    return Usage(_number(_PROMPT, last_bytes, at), _number(_CACHED, last_bytes, at), _number(_OUTPUT, last_bytes, at))


def _number(pattern: re.Pattern[bytes], data: bytes, at: int) -> int | None:
    found = pattern.search(data, at)
    return int(found[1]) if found else None
