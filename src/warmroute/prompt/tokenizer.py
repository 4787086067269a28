"""A model's tokenizer: its files, and a text's tokens as the engine has them."""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import fastokens  # type: ignore[import-untyped]
import msgspec
from tokenizers import AddedToken
from tokenizers import Tokenizer as LibraryTokenizer

from warmroute._kernel import TOKEN_BYTES
from warmroute.prompt.encoding_time import EncodingTime, Span

# Read a model's tokenizer files as an engine does: the tokenizer, its special tokens, its chat templates.
#
# vLLM loads these files with transformers 5, which does not always use tokenizer.json unchanged. Some tokenizer classes
# (LlamaTokenizer, Qwen2Tokenizer, …) use only the vocabulary and the merges of the file and define the rest themselves.
# So the same file gives different tokens under different classes. This module reproduces that for the common classes.
# For classes that it cannot reproduce, `inexact_reason` says so.


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


NAMED_TOKENS: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_CLASSES_THAT_USE_THE_FILE: Final = _words(
    "TokenizersBackend PreTrainedTokenizer PreTrainedTokenizerFast PythonBackend"
)

_MODEL_TYPES_THAT_USE_THE_FILE: Final = _words(
    """arctic chameleon deepseek_ocr deepseek_ocr2 deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4 deepseek_vl
    deepseek_vl_hybrid deepseek_vl_v2 ernie4_5 ernie4_5_moe flex_olmo fuyu glm glm4 glm4_moe glm4_moe_lite glm4v
    glm4v_moe gpt_bigcode granite granitemoe granitemoehybrid granitemoeshared hyperclovax internlm2 jamba janus
    kimi_k25 kimi_linear llava llava_next mimo_v2_flash minicpm3 minicpmv minimax_m2 ministral ministral3 mistral
    mistral3 mixtral molmo molmo2 nemotron olmo2 olmo3 olmo_hybrid opencua openvla paddleocr_vl persimmon phi3
    phi3_v phimoe pixtral smolvlm stablelm step3_vl step3p5 vipllava"""
)
"""Model types whose file transformers 5.19 uses unchanged, whatever class the configuration names."""

_CLASS_OF_MODEL_TYPE: Final = {
    "qwen2": "Qwen2Tokenizer",
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen4_exp"), "Qwen3_5Tokenizer"),
}
"""Model types for which transformers uses this class, whatever class the configuration names."""

_UNSUPPORTED_CLASSES: Final = _words(
    """AlbertTokenizer BarthezTokenizer BertTokenizer BigBirdTokenizer BlenderbotTokenizer CamembertTokenizer
    CLIPTokenizer CodeGenTokenizer CodeLlamaTokenizer CohereTokenizer DebertaTokenizer DebertaV2Tokenizer
    FunnelTokenizer GPTNeoXTokenizer HerbertTokenizer MBartTokenizer MBart50Tokenizer MPNetTokenizer NllbTokenizer
    OpenAIGPTTokenizer PegasusTokenizer ReformerTokenizer RemBertTokenizer RobertaTokenizer SeamlessM4TTokenizer
    Siglip2Tokenizer SplinterTokenizer T5Tokenizer UdopTokenizer WhisperTokenizer XGLMTokenizer XLMRobertaTokenizer
    XLNetTokenizer"""
)
"""Classes that change the tokenizer in ways that this module does not reproduce."""

_MODEL_TYPES_WITH_OWN_RENDERER: Final = frozenset(
    ("gpt_oss", "deepseek_v32", "deepseek_v4", "deepseek_v41", "kimi_k3", "inkling")
)
"""Model types whose chats vLLM usually renders with code instead of a template."""

_SPECIAL_TOKENS_OF_CLASS: Final = {
    "LlamaTokenizer": {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"},
    "Qwen2Tokenizer": dict.fromkeys(("unk_token", "eos_token", "pad_token"), "<|endoftext|>"),
    "Qwen3_5Tokenizer": dict.fromkeys(("unk_token", "eos_token", "pad_token"), "<|endoftext|>"),
    "GPT2Tokenizer": dict.fromkeys(("unk_token", "bos_token", "eos_token"), "<|endoftext|>"),
    "GemmaTokenizer": {f"{name}_token": f"<{name}>" for name in ("unk", "bos", "eos", "pad", "mask")},
}
"""Special tokens of a class where the configuration names none."""

_QWEN2_SPLIT: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN3_5_SPLIT: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    tokenizer: LibraryTokenizer
    special_tokens: dict[str, str]
    """The special tokens by name (bos_token, eos_token, …), which are variables of a chat template."""
    templates: dict[str, str] = field(default_factory=dict)
    """Chat templates by name. Most models have one, named `default`."""
    inexact_reason: str = ""
    """Why the engine's tokenizer may differ; empty where nothing suggests it."""
    chat_inexact_reason: str = ""
    """Why the engine may not render chats with the template; empty where nothing suggests it."""


def read_tokenizer_files(path: str | Path) -> TokenizerFiles:
    """Read a directory, or a tokenizer.json and the files beside it. Raises OSError or ValueError."""
    path = Path(path)
    folder, file = (path, path / "tokenizer.json") if path.is_dir() else (path.parent, path)
    definition: dict[str, Any] = msgspec.json.decode(file.read_bytes())
    config = _json_object(folder / "tokenizer_config.json")
    if "added_tokens_decoder" not in config:
        config = {**config, **_json_object(folder / "special_tokens_map.json")}
    model_config = _json_object(folder / "config.json")
    cls = _class_of(config, model_config)
    inexact_reason = _rebuild(definition, cls, config)
    if "auto_map" in config:
        inexact_reason = inexact_reason or "the model has its own tokenizer code"
    tokenizer = LibraryTokenizer.from_str(msgspec.json.encode(definition).decode())
    special_tokens = _add_tokens(tokenizer, cls, config)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    chat_inexact_reason = _chat_inexact_reason(folder, model_config)
    return TokenizerFiles(tokenizer, special_tokens, _templates(folder, config), inexact_reason, chat_inexact_reason)


def _json_object(path: Path) -> dict[str, Any]:
    try:
        tree = msgspec.json.decode(path.read_bytes())
    except FileNotFoundError:
        return {}
    return tree if isinstance(tree, dict) else {}


def _class_of(config: dict[str, Any], model_config: dict[str, Any]) -> str:
    """Return the class that transformers uses, without `Fast`."""
    model_type = str(model_config.get("model_type") or "")
    named = str(config.get("tokenizer_class") or model_config.get("tokenizer_class") or "").removesuffix("Fast")
    if model_type in _CLASS_OF_MODEL_TYPE and named:
        return _CLASS_OF_MODEL_TYPE[model_type]
    return "" if model_type in _MODEL_TYPES_THAT_USE_THE_FILE else named


def _rebuild(definition: dict[str, Any], cls: str, config: dict[str, Any]) -> str:
    """Change the definition as the class does. Return why the result may differ, or an empty string."""
    model = definition["model"]
    if not cls or cls in _CLASSES_THAT_USE_THE_FILE:
        return ""
    if cls in _UNSUPPORTED_CLASSES:
        return f"transformers changes a {cls} in a way that the router does not reproduce"
    if cls not in ("LlamaTokenizer", "Qwen2Tokenizer", "Qwen3_5Tokenizer", "GemmaTokenizer", "GPT2Tokenizer"):
        return ""  # transformers has no such class and uses the file unchanged
    if model.get("type") != "BPE":
        return f"the {cls} is not a BPE tokenizer"
    prefix_space = config.get("add_prefix_space")
    plain = {"type": "BPE", "vocab": model["vocab"], "merges": model["merges"], "dropout": None, "unk_token": None}
    if cls == "LlamaTokenizer":
        scheme = "never" if prefix_space is False else "always" if config.get("legacy", False) else "first"
        definition["model"] = {**plain, "fuse_unk": True, "byte_fallback": True, "ignore_merges": False}
        definition["normalizer"] = None
        metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": False}
        definition["pre_tokenizer"] = metaspace
    elif cls == "GemmaTokenizer":
        unknown = _content(config.get("unk_token", "<unk>"))
        definition["model"] = {**plain, "unk_token": unknown, "fuse_unk": True, "byte_fallback": True}
        definition["normalizer"] = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
        definition["pre_tokenizer"] = _split({"String": " "}, "MergedWithPrevious")
    else:
        definition["model"] = {**plain, "continuing_subword_prefix": "", "end_of_word_suffix": "", "fuse_unk": False}
        byte_level = {"type": "ByteLevel", "add_prefix_space": bool(prefix_space), "trim_offsets": True}
        if cls == "GPT2Tokenizer":
            definition["normalizer"] = None
            definition["pre_tokenizer"] = {**byte_level, "use_regex": True}
        else:
            split = _split({"Regex": _QWEN2_SPLIT if cls == "Qwen2Tokenizer" else _QWEN3_5_SPLIT}, "Isolated")
            definition["normalizer"] = {"type": "NFC"}
            parts = [split, {**byte_level, "use_regex": False}]
            definition["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": parts}
    return ""


def _split(pattern: dict[str, str], behavior: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": pattern, "behavior": behavior, "invert": False}


def _chat_inexact_reason(folder: Path, model_config: dict[str, Any]) -> str:
    if model_config.get("model_type") in _MODEL_TYPES_WITH_OWN_RENDERER:
        return "the engine renders this model's chats with its own code"
    if (folder / "tekken.json").exists() or any(folder.glob("tokenizer.model.v*")):
        return "the engine may use Mistral's own tokenizer"
    return ""


def _content(token: Any) -> str | None:
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _token(token: dict[str, Any], special: bool) -> AddedToken:
    names = ("single_word", "lstrip", "rstrip")
    return AddedToken(
        str(token["content"]),
        **{name: bool(token.get(name, False)) for name in names},
        normalized=bool(token.get("normalized", not special)),
        special=special,
    )


def _add_tokens(tokenizer: LibraryTokenizer, cls: str, config: dict[str, Any]) -> dict[str, str]:
    """Add tokens that only the configuration names, as transformers does. Return the named special tokens."""
    listed = config.get("added_tokens_decoder")
    tokens = sorted(listed.items(), key=lambda item: int(item[0])) if isinstance(listed, dict) else []
    # the configuration's flags override the file's
    tokenizer.add_tokens([_token(token, bool(token.get("special", False))) for _id, token in tokens if _content(token)])
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    config = {**_SPECIAL_TOKENS_OF_CLASS.get(cls, {}), **config}
    special = {name: content for name in NAMED_TOKENS if (content := _content(config.get(name))) is not None}
    for token in [*(config.get(name) for name in NAMED_TOKENS), *_extra_tokens(config)]:
        content = _content(token)
        if content is not None and content not in known:
            known.add(content)
            tokenizer.add_tokens([_token(token if isinstance(token, dict) else {"content": content}, special=True)])
    return special


def _extra_tokens(config: dict[str, Any]) -> list[Any]:
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    listed = list(extra.values()) if isinstance(extra, dict) else list(extra)
    return listed + [config[name] for name in config if name.endswith("_token") and name not in NAMED_TOKENS]


def _templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Template files take precedence over templates in the configuration."""
    templates: dict[str, str] = {}
    if (file := folder / "chat_template.jinja").is_file():
        templates["default"] = file.read_text(encoding="utf-8")
    for file in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[file.stem] = file.read_text(encoding="utf-8")
    if templates:
        return templates
    own = config.get("chat_template")
    if isinstance(own, str):
        return {"default": own}
    if isinstance(own, list):
        return {str(item["name"]): str(item["template"]) for item in own if isinstance(item, dict)}
    return {str(name): str(text) for name, text in own.items()} if isinstance(own, dict) else {}


# A model's tokenizer: encodes text to the same token ids as the engine's tokenizer.
#
# Two libraries can read a tokenizer definition. Engines use `tokenizers`, so it is the reference. fastokens is about a
# hundred times faster for repeated text and releases the GIL. When a tokenizer is loaded, both encode fixed texts; if
# they differ, or if fastokens cannot read the definition, `tokenizers` is used. Loading takes seconds: call
# `load_tokenizer` in a thread.
#
# Token ids are bytes, four for each id, little-endian, so that there is no Python object for each token.

SEGMENT_CACHE_BYTES: Final = 64 << 20
"""Memory of fastokens for texts that it has met: the next turn of a conversation repeats all earlier ones."""
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
        """Milliseconds that the slowest kinds of text take for each byte."""
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
                # Ends of prompts are few and repeat at once. A cleared cache is full again after as many requests.
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
            # Its cache is the part of fastokens that could differ without anyone noticing.
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
    # These parts change no ids of an encoded text. Two copies of a model may differ in them.
    ignored = ("version", "decoder", "truncation", "padding")
    relevant = {name: part for name, part in tree.items() if name not in ignored}
    return hashlib.sha256(msgspec.json.encode(relevant, order="deterministic")).hexdigest()[:16]
