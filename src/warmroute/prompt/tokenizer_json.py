"""Read a model's tokenizer files as an engine does: the tokenizer, its special tokens, its chat templates.

vLLM loads these files with transformers 5, which does not always use tokenizer.json unchanged. Some tokenizer classes
(LlamaTokenizer, Qwen2Tokenizer, …) use only the vocabulary and the merges of the file and define the rest themselves.
So the same file gives different tokens under different classes. This module reproduces that for the common classes. For
classes that it cannot reproduce, `inexact_reason` says so.
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
    tokenizer: Tokenizer
    special_tokens: dict[str, str]
    """By name: bos_token, eos_token, … They are variables of a chat template."""
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
    tokenizer = Tokenizer.from_str(msgspec.json.encode(definition).decode())
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


def _add_tokens(tokenizer: Tokenizer, cls: str, config: dict[str, Any]) -> dict[str, str]:
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
