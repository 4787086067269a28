"""What an engine makes of a model's tokenizer files: the tokenizer, its named special tokens, its chat templates.

vLLM loads them with transformers 5, which does not always take tokenizer.json as it stands: a tokenizer class that
has a pipeline of its own (LlamaTokenizer, Qwen2Tokenizer, …) takes the vocabulary and the merges from the file and
the rest from itself. So the same file gives other tokens under another class, and this file follows that. Where a
class is known to rebuild the tokenizer in a way that is not written down here, `doubt` says so.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec
from tokenizers import AddedToken, Tokenizer


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


NAMED_TOKENS: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_AS_THE_FILE_STANDS: Final = {
    "",
    "TokenizersBackend",
    "PreTrainedTokenizer",
    "PreTrainedTokenizerFast",
    "PythonBackend",
}

_TYPES_THAT_TAKE_THE_FILE: Final = _words(
    """arctic chameleon deepseek_ocr deepseek_ocr2 deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4 deepseek_vl
    deepseek_vl_hybrid deepseek_vl_v2 ernie4_5 ernie4_5_moe flex_olmo fuyu glm glm4 glm4_moe glm4_moe_lite glm4v
    glm4v_moe gpt_bigcode granite granitemoe granitemoehybrid granitemoeshared hyperclovax internlm2 jamba janus
    kimi_k25 kimi_linear llava llava_next mimo_v2_flash minicpm3 minicpmv minimax_m2 ministral ministral3 mistral
    mistral3 mixtral molmo molmo2 nemotron olmo2 olmo3 olmo_hybrid opencua openvla paddleocr_vl persimmon phi3
    phi3_v phimoe pixtral smolvlm stablelm step3_vl step3p5 vipllava"""
)
"""Model types that transformers 5.19 loads as the file stands, whatever class the file names."""

_CLASS_OF_TYPE: Final = {
    "qwen2": "Qwen2Tokenizer",
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen4_exp"), "Qwen3_5Tokenizer"),
}
"""Model types whose class is taken from here, whatever class the file names."""

_REBUILT_UNSEEN: Final = _words(
    """AlbertTokenizer BarthezTokenizer BertTokenizer BigBirdTokenizer BlenderbotTokenizer CamembertTokenizer
    CLIPTokenizer CodeGenTokenizer CodeLlamaTokenizer CohereTokenizer DebertaTokenizer DebertaV2Tokenizer
    FunnelTokenizer GPTNeoXTokenizer HerbertTokenizer MBartTokenizer MBart50Tokenizer MPNetTokenizer NllbTokenizer
    OpenAIGPTTokenizer PegasusTokenizer ReformerTokenizer RemBertTokenizer RobertaTokenizer SeamlessM4TTokenizer
    Siglip2Tokenizer SplinterTokenizer T5Tokenizer UdopTokenizer WhisperTokenizer XGLMTokenizer XLMRobertaTokenizer
    XLNetTokenizer"""
)
"""Classes that rebuild the tokenizer in ways that are not followed here."""

_CHATS_BY_CODE: Final = frozenset(("gpt_oss", "deepseek_v32", "deepseek_v4", "deepseek_v41", "kimi_k3", "inkling"))
"""Model types for which vLLM has, or is commonly given, a renderer of its own instead of a template."""

_TOKENS_OF_CLASS: Final = {
    "LlamaTokenizer": {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"},
    "Qwen2Tokenizer": dict.fromkeys(("unk_token", "eos_token", "pad_token"), "<|endoftext|>"),
    "Qwen3_5Tokenizer": dict.fromkeys(("unk_token", "eos_token", "pad_token"), "<|endoftext|>"),
    "GPT2Tokenizer": dict.fromkeys(("unk_token", "bos_token", "eos_token"), "<|endoftext|>"),
    "GemmaTokenizer": {f"{name}_token": f"<{name}>" for name in ("unk", "bos", "eos", "pad", "mask")},
}
"""Special tokens that a class has where the configuration names none."""

_QWEN2_WORDS: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN3_5_WORDS: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """A model's tokenizer files as an engine reads them."""

    tokenizer: Tokenizer
    special_tokens: dict[str, str]
    """bos_token, eos_token, …: variables of a chat template."""
    templates: dict[str, str] = field(default_factory=dict)
    """Chat templates by name; the usual one is `default`."""
    doubt: str = ""
    """Why the engine's tokenizer may be another; empty where nothing speaks for it."""
    chat_doubt: str = ""
    """Why the engine may render chats in another way than by a template."""


def read_tokenizer_files(path: str | Path) -> TokenizerFiles:
    """Reads a directory, or a tokenizer.json and what lies beside it. Raises OSError or ValueError."""
    path = Path(path)
    folder, file = (path, path / "tokenizer.json") if path.is_dir() else (path.parent, path)
    definition: dict[str, Any] = msgspec.json.decode(file.read_bytes())
    config = _json_object(folder / "tokenizer_config.json")
    if "added_tokens_decoder" not in config:
        config = {**config, **_json_object(folder / "special_tokens_map.json")}
    model_config = _json_object(folder / "config.json")
    cls = _class_of(config, model_config)
    doubt = _rebuild(definition, cls, config)
    if "auto_map" in config:
        doubt = doubt or "the model brings its own tokenizer code"
    tokenizer = Tokenizer.from_str(msgspec.json.encode(definition).decode())
    special_tokens = _add_tokens(tokenizer, cls, config)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return TokenizerFiles(
        tokenizer, special_tokens, _templates(folder, config), doubt, _chat_doubt(folder, model_config)
    )


def _json_object(path: Path) -> dict[str, Any]:
    try:
        tree = msgspec.json.decode(path.read_bytes())
    except FileNotFoundError:
        return {}
    return tree if isinstance(tree, dict) else {}


def _class_of(config: dict[str, Any], model_config: dict[str, Any]) -> str:
    """Which class transformers takes, without `Fast`."""
    model_type = str(model_config.get("model_type") or "")
    named = str(config.get("tokenizer_class") or model_config.get("tokenizer_class") or "").removesuffix("Fast")
    if model_type in _CLASS_OF_TYPE and named:
        return _CLASS_OF_TYPE[model_type]
    return "" if model_type in _TYPES_THAT_TAKE_THE_FILE else named


def _rebuild(definition: dict[str, Any], cls: str, config: dict[str, Any]) -> str:
    """Changes the definition as the class would. Returns a doubt."""
    model = definition["model"]
    if cls in _AS_THE_FILE_STANDS:
        return ""
    if cls in _REBUILT_UNSEEN:
        return f"transformers rebuilds a {cls} in a way that is not followed here"
    if cls not in ("LlamaTokenizer", "Qwen2Tokenizer", "Qwen3_5Tokenizer", "GemmaTokenizer", "GPT2Tokenizer"):
        return ""  # no class of this name: the file is taken as it stands
    if model.get("type") != "BPE":
        return f"a {cls} that is not made of byte pairs"
    prefix_space = config.get("add_prefix_space")
    plain = {"type": "BPE", "vocab": model["vocab"], "merges": model["merges"], "dropout": None, "unk_token": None}
    if cls == "LlamaTokenizer":
        scheme = "never" if prefix_space is False else "always" if config.get("legacy", False) else "first"
        definition["model"] = {**plain, "fuse_unk": True, "byte_fallback": True, "ignore_merges": False}
        definition["normalizer"] = None
        definition["pre_tokenizer"] = {
            "type": "Metaspace",
            "replacement": "▁",
            "prepend_scheme": scheme,
            "split": False,
        }
    elif cls == "GemmaTokenizer":
        unknown = _content(config.get("unk_token", "<unk>"))
        definition["model"] = {**plain, "unk_token": unknown, "fuse_unk": True, "byte_fallback": True}
        definition["normalizer"] = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
        definition["pre_tokenizer"] = _split({"String": " "}, "MergedWithPrevious")
    else:
        definition["model"] = {**plain, "continuing_subword_prefix": "", "end_of_word_suffix": "", "fuse_unk": False}
        bytes_only = {"type": "ByteLevel", "add_prefix_space": bool(prefix_space), "trim_offsets": True}
        if cls == "GPT2Tokenizer":
            definition["normalizer"] = None
            definition["pre_tokenizer"] = {**bytes_only, "use_regex": True}
        else:
            words = _split({"Regex": _QWEN2_WORDS if cls == "Qwen2Tokenizer" else _QWEN3_5_WORDS}, "Isolated")
            definition["normalizer"] = {"type": "NFC"}
            definition["pre_tokenizer"] = {
                "type": "Sequence",
                "pretokenizers": [words, {**bytes_only, "use_regex": False}],
            }
    return ""


def _split(pattern: dict[str, str], behavior: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": pattern, "behavior": behavior, "invert": False}


def _chat_doubt(folder: Path, model_config: dict[str, Any]) -> str:
    if model_config.get("model_type") in _CHATS_BY_CODE:
        return "the engine renders this model's chats by code of its own"
    if (folder / "tekken.json").exists() or any(folder.glob("tokenizer.model.v*")):
        return "the engine may take Mistral's own tokenizer"
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


def _add_tokens(tokenizer: Tokenizer, cls: str, config: dict[str, Any]) -> dict[str, str]:
    """Adds what the configuration names and the file lacks, as transformers does. Returns the named special tokens."""
    listed = config.get("added_tokens_decoder")
    tokens = sorted(listed.items(), key=lambda item: int(item[0])) if isinstance(listed, dict) else []
    # the configuration's flags win over the file's
    tokenizer.add_tokens([_token(token, bool(token.get("special", False))) for _id, token in tokens if _content(token)])
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    config = {**_TOKENS_OF_CLASS.get(cls, {}), **config}
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
    """A file beside the tokenizer goes before the configuration's own."""
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
