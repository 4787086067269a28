"""Which paths the router forwards to nodes, and which it answers itself."""

from __future__ import annotations

import re
from typing import Final

from warmroute.edge import errors

# Any other path under /v1 is forwarded too, if its body names a model.
FORWARDED: Final = frozenset(
    {
        b"/v1/chat/completions",
        b"/v1/completions",
        b"/v1/embeddings",
        b"/v1/responses",
        b"/v1/messages",
        b"/v1/rerank",
        b"/v1/score",
        b"/v1/audio/transcriptions",
        b"/tokenize",
        b"/detokenize",
    }
)
NEVER_FORWARDED: Final = frozenset({b"/v1/load_lora_adapter", b"/v1/unload_lora_adapter"})
"""An engine's administration is not for clients."""
WITH_OUTPUT_TOKENS: Final = frozenset({b"/v1/chat/completions", b"/v1/completions", b"/v1/responses", b"/v1/messages"})
"""Paths whose responses have generated tokens."""
_PLAIN_PATH: Final = re.compile(rb"(?:/(?!\.{1,2}(?:/|\Z))[A-Za-z0-9_~.:@!$&'()*+,=-]+)+")
"""Segments of characters that have one meaning only; no segment is empty, `.` or `..`."""
CHATS: Final = (b"/v1/chat/completions", b"/v1/messages")
HEALTH: Final = (b"/health", b"/ready")


def is_anthropic(target: bytes) -> bool:
    """Return whether the path belongs to Anthropic's API."""
    return target.startswith(b"/v1/messages") and target[12:13] in (b"", b"/", b"?")


def check_path(method: bytes, path: bytes) -> None:
    """Raises HttpError for a path or a method that the router does not serve."""
    if path == b"/v1/models" or path.startswith(b"/v1/models/"):
        if method not in (b"GET", b"HEAD"):
            raise errors.method_not_allowed("GET")
    elif path in FORWARDED:
        if method != b"POST":
            raise errors.method_not_allowed("POST")
    elif not path.startswith(b"/v1/") or method != b"POST" or path in NEVER_FORWARDED or _ambiguous(path):
        raise not_found(path)


def not_found(path: bytes) -> errors.HttpError:
    return errors.not_found(path.decode("ascii", "replace")[:200])


def _ambiguous(path: bytes) -> bool:
    """Whether a node could read the path as another one: escapes, parameters (`;`), dots, empty segments."""
    return _PLAIN_PATH.fullmatch(path) is None
