"""A model's tokenizer: text to token ids, as the engine's own would give them.

Two libraries read the same definition. fastokens is some hundred times faster where text repeats, and lets other
threads run; `tokenizers` is what engines use, and the measure. Both encode a fixed text at load, and where they
differ, or where fastokens cannot read the definition, `tokenizers` does the work. Loading takes seconds: call
`load_tokenizer` in a thread.

Token ids travel as bytes, four for each, little-endian: no Python object for each token.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from pathlib import Path
from typing import Any, Final

import fastokens  # type: ignore[import-untyped]
import msgspec

from warmroute.prompt.tokenizer_files import TokenizerFiles, read_tokenizer_files

SEGMENT_CACHE_BYTES: Final = 64 << 20
TOKEN_BYTES: Final = 4
_SHORT_TEXT, _SHORT_TEXTS = 200, 256

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
    """One model's tokenizer. Safe to use from several threads."""

    def __init__(self, files: TokenizerFiles, segment_cache_bytes: int = SEGMENT_CACHE_BYTES) -> None:
        self.templates = files.templates
        self.special_tokens = files.special_tokens
        self.chat_doubt = files.chat_doubt
        """Why chats may be rendered in another way."""
        self.doubt = files.doubt
        """Why the engine's tokenizer may be another; empty where nothing speaks for it."""
        self.slow_because = ""
        """Why `tokenizers` does the work; empty where fastokens does."""
        self._reference = files.tokenizer
        definition = self._reference.to_str()
        tree = msgspec.json.decode(definition)
        self._added: dict[str, dict[str, Any]] = {token["content"]: token for token in tree["added_tokens"]}
        self._has_normalizer = tree["normalizer"] not in (None, {"type": "Sequence", "normalizers": []})
        self._cuts: dict[str, bool] = {}
        self._again: dict[str, bytes] = {}
        self.fingerprint = _fingerprint(tree)
        """Sixteen hexadecimal digits that stand for everything the token ids depend on."""
        self._fast = self._load_fast(definition, segment_cache_bytes)
        self.before, self.behind = self._frame()
        """What `add_special_tokens` puts before and behind a text."""

    # ---- Encoding ----

    def encode(self, text: str, add_special_tokens: bool = False) -> bytes:
        """Raises UnicodeEncodeError for text that has no UTF-8."""
        if self._fast is not None:
            tokens: bytes = self._fast.encode_batch_flat([text])[0]
        else:
            tokens = self._slowly(text)
        return self.before + tokens + self.behind if add_special_tokens else tokens

    def encode_again(self, text: str) -> bytes:
        """A text that comes with every request: how a prompt ends."""
        tokens = self._again.get(text)
        if tokens is None:
            tokens = self.encode(text)
            if len(text) <= _SHORT_TEXT:
                if len(self._again) >= _SHORT_TEXTS:
                    self._again.clear()
                self._again[text] = tokens
        return tokens

    def _slowly(self, text: str) -> bytes:
        text.encode()
        return packed(self._reference.encode(text, add_special_tokens=False).ids)

    # ---- Cutting ----

    def cuts(self, token: str) -> bool:
        """Whether text may be cut behind this added token, if both halves are given the token: the ids stay the same.

        The token must be found where it stands whatever is around it: it takes no spaces with it, is looked for in the
        text as it is, and no other added token holds it or overlaps with it.
        """
        cuts = self._cuts.get(token)
        if cuts is None:
            cuts = self._cuts[token] = self._is_found_anywhere(token)
        return cuts

    def _is_found_anywhere(self, token: str) -> bool:
        flags = self._added.get(token)
        if flags is None or flags["lstrip"] or flags["rstrip"] or flags["single_word"]:
            return False
        if flags["normalized"] and self._has_normalizer:
            return False
        if self.encode(token) != self.token_id(token):
            return False
        return not any(other != token and _overlap(other, token) for other in self._added)

    @property
    def added_tokens(self) -> list[str]:
        return list(self._added)

    def token_id(self, token: str) -> bytes:
        """The id of an added token, as bytes."""
        return packed([int(self._added[token]["id"])])

    # ---- Loading ----

    def _load_fast(self, definition: str, segment_cache_bytes: int) -> fastokens.Tokenizer | None:
        try:
            fast = fastokens.Tokenizer.from_json_str(definition)
        except ValueError as error:
            self.slow_because = f"fastokens cannot read it: {str(error)[:200]}"
            return None
        fast.enable_segment_cache(segment_cache_bytes)
        for text in self.check_texts():
            for _again in range(2):  # the second time from its cache
                if fast.encode_batch_flat([text])[0] != self._slowly(text):
                    self.slow_because = "fastokens encodes the fixed text in another way"
                    return None
        return fast

    def check_texts(self) -> list[str]:
        """Fixed texts to compare tokenizers by; they hold this tokenizer's own added tokens, too."""
        added = list(self._added)
        some = added[:40] + added[-40:]
        glued = "".join(f"{token}x {token} {token}\n{token}" for token in some)
        broken = " ".join(token[:-1] + " " + token[1:] for token in some)
        return [*CHECK_TEXTS, glued, broken, "".join(CHECK_TEXTS[2:]), "".join(some).join(CHECK_TEXTS[2:])]

    def _frame(self) -> tuple[bytes, bytes]:
        framed = packed(self._reference.encode("x", add_special_tokens=True).ids)
        bare = packed(self._reference.encode("x", add_special_tokens=False).ids)
        before, _bare, behind = framed.partition(bare)
        if before + bare + behind != framed or len(before) % TOKEN_BYTES:
            self.doubt = self.doubt or "its special tokens are not put around the text"
            return b"", b""
        return before, behind


def load_tokenizer(path: str | Path, segment_cache_bytes: int = SEGMENT_CACHE_BYTES) -> Tokenizer:
    """From a directory or a tokenizer.json. Takes seconds. Raises OSError or ValueError."""
    try:
        return Tokenizer(read_tokenizer_files(path), segment_cache_bytes)
    except (OSError, ValueError):
        raise
    except Exception as error:  # tokenizers raises plain exceptions for definitions that it cannot read
        raise ValueError(f"{path}: {error}") from error


def packed(ids: list[int]) -> bytes:
    """Token ids as bytes. Raises OverflowError for what is no token id."""
    tokens = array("I", ids)
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens.tobytes()


def unpacked(tokens: bytes) -> list[int]:
    """The ids in these bytes."""
    ids = array("I", tokens)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tolist()


def _overlap(other: str, token: str) -> bool:
    """Whether the two could be found at overlapping places of a text, so that one would hide the other."""
    if token in other:
        return True
    return any(other.endswith(token[:n]) for n in range(1, len(token)))


def _fingerprint(tree: dict[str, Any]) -> str:
    matters = {name: part for name, part in tree.items() if name not in ("version", "decoder", "truncation", "padding")}
    return hashlib.sha256(msgspec.json.encode(matters, order="deterministic")).hexdigest()[:16]
