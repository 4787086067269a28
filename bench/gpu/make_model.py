"""Makes a Qwen3 model with random weights, for `transformers serve`. Run by a Python with torch and transformers.

    python bench/gpu/make_model.py SHAPE TOKENIZER_DIR MODEL_DIR

Random weights take as long as trained ones: the time of a prefill depends on the shape alone.
"""

import os
import shutil
import sys

import torch
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

SHAPES = {
    "8b": {
        "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "intermediate_size": 12288, "tie_word_embeddings": False,
    },
    "tiny": {
        "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 64, "intermediate_size": 768, "tie_word_embeddings": True,
    },
}  # fmt: skip


def main() -> None:
    shape, tokenizer, folder = sys.argv[1:]
    dtype, device = (torch.bfloat16, "cuda") if torch.cuda.is_available() else (torch.float32, "cpu")
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    config = Qwen3Config(
        vocab_size=151680,
        max_position_embeddings=40960,
        rope_theta=1e6,
        torch_dtype=str(dtype).removeprefix("torch."),
        **SHAPES[shape],
    )
    with torch.device(device):
        model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(
        do_sample=False, max_new_tokens=64, eos_token_id=151645, pad_token_id=151643
    )
    model.save_pretrained(folder, max_shard_size="4GB")
    for name in os.listdir(tokenizer):
        shutil.copy(os.path.join(tokenizer, name), folder)


if __name__ == "__main__":
    main()
