"""Make a tiny language model with random weights, for a real engine on a CPU. Run by the engine's Python:

    python make_tiny_model.py DIRECTORY [--slower]

The model is a Qwen2 with two layers. Its tokenizer has 4,096 tokens and is trained on this repository's Python code.
`--slower` makes a larger one, whose prefill takes far longer than everything around it.
"""

import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

SOURCES = Path(__file__).resolve().parents[2] / "src" / "warmroute"
PAD, START, END = "<|pad|>", "<|im_start|>", "<|im_end|>"
"""`transformers serve` expects ChatML of a Qwen model. With other words it repeats the prompt in its response."""
MAX_TOKENS = 4096
VOCABULARY = 4096
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}
"""


def train_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[PAD, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((path.read_text() for path in sorted(SOURCES.rglob("*.py"))), trainer)
    assert tokenizer.get_vocab_size() == VOCABULARY
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[START],
        model_max_length=MAX_TOKENS,
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def main() -> None:
    folder, slower = sys.argv[1], "--slower" in sys.argv
    tokenizer = train_tokenizer()
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=256 if slower else 64,
        intermediate_size=768 if slower else 128,
        num_hidden_layers=4 if slower else 2,
        num_attention_heads=4 if slower else 2,
        num_key_value_heads=2 if slower else 1,
        max_position_embeddings=MAX_TOKENS,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    Qwen2ForCausalLM(config).to(torch.float32 if slower else torch.bfloat16).save_pretrained(folder)


if __name__ == "__main__":
    main()
