"""Train the tokenizers of small-model and small-llama on generated text.

small-model is like Qwen's: byte-level BPE with 1,200 tokens. small-llama is like Llama 2's: BPE on characters, with
spaces as `▁`, bytes for newlines and for most characters outside ASCII, and `<s>` at the start.

The result is committed, because another release of `tokenizers` may train another one. The tests do not run this.

    python tests/prompt/make_models.py
"""

from __future__ import annotations

import json
from pathlib import Path
from string import ascii_letters, digits, punctuation
from typing import Any

from generated_text import TextGenerator
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

HERE = Path(__file__).parent
WORDS = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
SPECIAL = ["<|end|>", "<|start|>", "<|stop|>", "<|bos|>"]
PLAIN = ["<think>", "</think>", "<tool_response>", "</tool_response>"]
LLAMA_SPECIAL = ["<unk>", "<s>", "</s>"]


def training_texts() -> list[str]:
    generator = TextGenerator(seed=1)
    return [generator.training_text() for _ in range(4000)]


def train_small_model() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(WORDS), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1200, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(training_texts(), trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in PLAIN])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", tokenizer.token_to_id("<|bos|>"))]
    )
    return tokenizer


def train_small_llama() -> Tokenizer:
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    alphabet = [*ascii_letters, *digits, *punctuation, *"äöüß"]
    trainer = trainers.BpeTrainer(vocab_size=1500, initial_alphabet=alphabet, show_progress=False)
    lines = [line for text in training_texts() for line in text.replace(". ", ".\n").splitlines() if line.isascii()]
    trained.train_from_iterator(lines, trainer)
    model = json.loads(trained.to_str())["model"]
    tokens = [
        *LLAMA_SPECIAL,
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *sorted(model["vocab"], key=model["vocab"].get),
    ]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: number for number, token in enumerate(tokens)},
            merges=[(left, right) for left, right in model["merges"]],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in LLAMA_SPECIAL])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def write_model(name: str, tokenizer: Tokenizer, template: str, config: dict[str, Any]) -> None:
    folder = HERE / name
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=False))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text((HERE / "templates" / f"{template}.jinja").read_text())


def main() -> None:
    config = {"bos_token": "<|bos|>", "eos_token": "<|end|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    write_model("small-model", train_small_model(), "thinking", config)
    named = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    llama = {**named, "add_bos_token": True, "legacy": False, "tokenizer_class": "LlamaTokenizer"}
    write_model("small-llama", train_small_llama(), "llama", llama)


if __name__ == "__main__":
    main()
