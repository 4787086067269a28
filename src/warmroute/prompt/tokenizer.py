"""A model's tokenizer: encodes text to the same token ids as the engine's tokenizer.

Two libraries can read a tokenizer definition. Engines use `tokenizers`, so it is the reference. fastokens is about a
hundred times faster for repeated text and releases the GIL. When a tokenizer is loaded, both encode fixed texts; if
they differ, or if fastokens cannot read the definition, `tokenizers` is used. Loading takes seconds: call
`load_tokenizer` in a thread.

Token ids are bytes, four for each id, little-endian, so that there is no Python object for each token.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import fastokens  # type: ignore[import-untyped]
import msgspec

from warmroute._kernel import TOKEN_BYTES
from warmroute.prompt.encoding_time import EncodingTime, Span
from warmroute.prompt.tokenizer_json import TokenizerFiles, read_tokenizer_files

SEGMENT_CACHE_BYTES: Final = 64 << 20
_MAX_CACHED_TEXT, _MAX_CACHED_TEXTS = 200, 256
"""Bounds of the cache of `encode_cached`: characters of a text, and number of texts."""

CHECK_TEXTS: Final = (
    "",
    " ",
    "Hello, world! It's 12345 o'clock; we'll see.\r\n\r\n\tTabs\t and  two spaces   three.",
    "def f(x: int) -> str:\n    if x != 0xFF:\n        return f'{x!r}'  # comment\n\n\n    pass\n" * 3,
    "a" * 300 + " " * 200 + "b" + "\n" * 50 + "\t" * 40 + "=" * 120 + " end ",
    "Ünïcödé naïve café e\u0301 o\u0308 \u212b ﬁ Straße İstanbul ǅ \u00a0\u2003\u3000\ufeff\u200b\u200d\u0000\u0007",
    "你好，世界。日本語のテキスト、한국어 텍스트, ไทย, العربية, עברית, हिन्दी, ελληνικά",
    "🙂👍🏽👩‍👩‍👧‍👦🇩🇪✈️ \U0001f9d1\u200d\U0001f4bb 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 \ue000 \U0010ffff",
    '{"a": [1, 2.5, -3e10, null, true], "b": "\\u00e9\\n", "c": {}} <xml attr="v">&amp;</xml> https://x.y/z?q=1#f',
)


class Tokenizer:
    """One model's tokenizer. Thread-safe."""

    def __init__(self, files: TokenizerFiles, segment_cache_bytes: int = SEGMENT_CACHE_BYTES) -> None:
        self.templates = files.templates
        self.special_tokens = files.special_tokens
        self.chat_inexact_reason = files.chat_inexact_reason
        """Why the engine may render chats differently; empty where nothing suggests it."""
        self.inexact_reason = files.inexact_reason
        """Why the engine's tokenizer may differ; empty where nothing suggests it."""
        self.slow_reason = ""
        """Why fastokens is not used; empty where it is."""
        self._reference = files.tokenizer
        definition = self._reference.to_str()
        tree = msgspec.json.decode(definition)
        self._added: dict[str, dict[str, Any]] = {token["content"]: token for token in tree["added_tokens"]}
        self._has_normalizer = tree["normalizer"] not in (None, {"type": "Sequence", "normalizers": []})
        self._can_cut: dict[str, bool] = {}
        self._cached: dict[str, bytes] = {}
        self.fingerprint = _fingerprint(tree)
        """A hash, in 16 hexadecimal digits, of everything that the token ids depend on."""
        self._fast = self._load_fast(definition, segment_cache_bytes)
        self._encoding_time = EncodingTime(self.encode, self._fast is not None)
        self.worst_ms_per_byte = self._encoding_time.worst_ms_per_byte
        """The longest that it takes to encode a text, for each of its bytes."""
        self.special_prefix, self.special_suffix = self._find_special_tokens()
        """The tokens that `add_special_tokens` puts before and after a text."""

    # ---- Encoding ----

    def encode(self, text: str, add_special_tokens: bool = False) -> bytes:
        """Raises UnicodeEncodeError for text that cannot be encoded as UTF-8."""
        if self._fast is not None:
            tokens: bytes = self._fast.encode_batch_flat([text])[0]
        else:
            tokens = self._encode_reference(text)
        return self.special_prefix + tokens + self.special_suffix if add_special_tokens else tokens

    def encode_cached(self, text: str) -> bytes:
        """Encode a text that many requests contain, such as the end of a prompt, and cache the result."""
        tokens = self._cached.get(text)
        if tokens is None:
            tokens = self.encode(text)
            if len(text) <= _MAX_CACHED_TEXT:
                if len(self._cached) >= _MAX_CACHED_TEXTS:
                    self._cached.clear()
                self._cached[text] = tokens
        return tokens

    def _encode_reference(self, text: str) -> bytes:
        text.encode()
        return pack_token_ids(self._reference.encode(text, add_special_tokens=False).ids)

    def estimate_encode_ms(self, body: bytes, spans: Sequence[Span]) -> float:
        """Return how long these parts of a request's body take to encode. Takes samples of a long text."""
        return self._encoding_time.estimate_ms(self.encode, body, spans)

    # ---- Cutting ----

    def can_cut_after(self, token: str) -> bool:
        """Return whether text may be cut after this added token without changing the ids, if both halves contain it.

        The tokenizer must find the token whatever text is around it: the token takes no spaces with it, is not
        normalized, and no other added token contains it or overlaps with it.
        """
        can_cut = self._can_cut.get(token)
        if can_cut is None:
            can_cut = self._can_cut[token] = self._is_found_anywhere(token)
        return can_cut

    def _is_found_anywhere(self, token: str) -> bool:
        flags = self._added.get(token)
        if flags is None or flags["lstrip"] or flags["rstrip"] or flags["single_word"]:
            return False
        if flags["normalized"] and self._has_normalizer:
            return False
        if self.encode(token) != self.token_id(token):
            return False
        return not any(_overlap(other, token) for other in self._added)

    @property
    def added_tokens(self) -> list[str]:
        return list(self._added)

    def token_id(self, token: str) -> bytes:
        """Return the id of an added token, as bytes."""
        return pack_token_ids([int(self._added[token]["id"])])

    # ---- Loading ----

    def _load_fast(self, definition: str, segment_cache_bytes: int) -> fastokens.Tokenizer | None:
        try:
            fast = fastokens.Tokenizer.from_json_str(definition)
        except ValueError as error:
            self.slow_reason = f"fastokens cannot read it: {str(error)[:200]}"
            return None
        fast.enable_segment_cache(segment_cache_bytes)
        for text in self.check_texts():
            for _repetition in range(2):  # the second time from its cache
                if fast.encode_batch_flat([text])[0] != self._encode_reference(text):
                    self.slow_reason = "fastokens and tokenizers encode the fixed texts differently"
                    return None
        return fast

    def check_texts(self) -> list[str]:
        """Return fixed texts to compare tokenizers with; they contain some of this tokenizer's added tokens."""
        added = list(self._added)
        some = added[:40] + added[-40:]
        glued = "".join(f"{token}x {token} {token}\n{token}" for token in some)
        broken = " ".join(token[:-1] + " " + token[1:] for token in some)
        return [*CHECK_TEXTS, glued, broken, "".join(CHECK_TEXTS[2:]), "".join(some).join(CHECK_TEXTS[2:])]

    def _find_special_tokens(self) -> tuple[bytes, bytes]:
        framed = pack_token_ids(self._reference.encode("x", add_special_tokens=True).ids)
        bare = pack_token_ids(self._reference.encode("x", add_special_tokens=False).ids)
        prefix, _bare, suffix = framed.partition(bare)
        if prefix + bare + suffix != framed or len(prefix) % TOKEN_BYTES:
            self.inexact_reason = self.inexact_reason or "the tokenizer puts special tokens within the text"
            return b"", b""
        return prefix, suffix


def load_tokenizer(path: str | Path, segment_cache_bytes: int = SEGMENT_CACHE_BYTES) -> Tokenizer:
    """Load a tokenizer from a directory or a tokenizer.json. Takes seconds. Raises OSError or ValueError."""
    try:
        return Tokenizer(read_tokenizer_files(path), segment_cache_bytes)
    except (OSError, ValueError):
        raise
    except Exception as error:  # `tokenizers` raises plain Exceptions
        raise ValueError(f"{path}: {error}") from error


def pack_token_ids(ids: list[int]) -> bytes:
    """Return token ids as bytes. Raises OverflowError for an id outside 32 bits."""
    tokens = array("I", ids)
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens.tobytes()


def _overlap(other: str, token: str) -> bool:
    """Return whether a text can contain both tokens at overlapping positions, so that one hides the other."""
    if token in other and token != other:
        return True
    return any(other.endswith(token[:n]) for n in range(1, len(token)))


def _fingerprint(tree: dict[str, Any]) -> str:
    ignored = ("version", "decoder", "truncation", "padding")
    relevant = {name: part for name, part in tree.items() if name not in ignored}
    return hashlib.sha256(msgspec.json.encode(relevant, order="deterministic")).hexdigest()[:16]
