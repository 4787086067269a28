"""What an answer says of its tokens, found in its last bytes: OpenAI's usage (chat, completions, responses) and
Anthropic's, which counts as input only what was not cached. Quotes within a text are escaped in JSON, so nothing that a
model says can pass for it.
"""

from warmroute._kernel._http import read_usage as usage_of

__all__ = ["usage_of"]
