"""Whether an event stream has come to its last event. A client may leave then: it has the whole response.

OpenAI's Python client does so after `[DONE]`, without waiting for the end of the HTTP response.
"""

from __future__ import annotations

import re
from typing import Final

_LAST: Final = re.compile(
    rb"(?:^|\n)(?:data: ?\[DONE\]|event: ?(?:message_stop|response\.(?:completed|incomplete|failed))\r?\ndata:[^\n]*\n)"
    rb"[\s0-9a-f]*\Z"
)
"""What follows may be an empty line, and the framing of chunks."""
_MARKERS: Final = (b"[DONE]", b"message_stop", b"response.completed", b"response.incomplete", b"response.failed")
MAX_TAIL_BYTES: Final = 65_536
"""How much of a stream's end is kept for the search."""


def may_end(piece: bytes) -> bool:
    """Return whether the last event may be in this piece. Cheap, for each piece of a stream."""
    return any(marker in piece for marker in _MARKERS)


def has_last_event(tail: bytes) -> bool:
    """`tail`: the end of a response's body."""
    return _LAST.search(tail) is not None
