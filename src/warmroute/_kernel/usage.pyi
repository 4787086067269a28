from typing import Final

USAGE_TAIL_BYTES: Final[int]
"""How many of a response's last bytes `read_usage` searches."""

def read_usage(last_bytes: bytes, /) -> tuple[int | None, int | None, int | None] | None:
    """Return (prompt tokens, cached tokens, output tokens) as far as a response's end reports them; None if it has no
    usage.

    Reads OpenAI's usage (chat, completions, responses) and Anthropic's, which counts as input only what was not cached.
    """
