"""What vLLM and transformers themselves make of requests. Run by the Python of an environment that has them:

    python engine_oracle.py < asks.jsonl > answers.jsonl

An ask is {"tokenizer": directory, "path": …, "body": {…}}: vLLM's own request types and renderer, without an engine;
or {"tokenizer": directory, "chat": […], "tools": …}: transformers' apply_chat_template. An answer is a list of token
ids, or a string that says why there is none.
"""

import asyncio
import json
import os
import sys
import tempfile

os.environ["VLLM_LOGGING_LEVEL"] = "CRITICAL"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 200_000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 1 << 20,
}
renderers = {}
tokenizers = {}


def renderer(folder):
    if folder not in renderers:
        from vllm.config import ModelConfig, VllmConfig
        from vllm.renderers import renderer_from_config
        from vllm.renderers.online_renderer import OnlineRenderer

        copy = tempfile.mkdtemp()
        for name in os.listdir(folder):
            if name != "config.json":
                os.symlink(os.path.join(folder, name), os.path.join(copy, name))
        with open(os.path.join(copy, "config.json"), "w") as file:
            json.dump(SHAPE, file)
        model = ModelConfig(model=copy, tokenizer=copy, max_model_len=1 << 20, dtype="float32")
        renderers[folder] = OnlineRenderer(
            model_config=model,
            renderer=renderer_from_config(VllmConfig(model_config=model)),
            request_logger=None,
            chat_template=None,
            chat_template_content_format="auto",
            enable_auto_tools=True,
            tool_parser="hermes",
        )
    return renderers[folder]


async def render(ask):
    from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

    online, path, body = renderer(ask["tokenizer"]), ask["path"], ask["body"]
    if path == "/v1/completions":
        return (await online.render_completion(CompletionRequest.model_validate(body)))[0]["prompt_token_ids"]
    if path == "/v1/responses":
        made = await online.render_responses(ResponsesRequest.model_validate(body))
        return made.engine_input["prompt_token_ids"]
    if path == "/v1/messages":
        serving = object.__new__(AnthropicServingMessages)
        serving.online_renderer, serving.model_config = online, online.model_config
        request = AnthropicServingMessages.to_chat_completion_request(
            AnthropicMessagesRequest.model_validate(body),
            merge_inline_system=AnthropicServingMessages._should_merge_inline_system(online),
            disabled_thinking_effort=await serving._probe_disabled_thinking_effort(),
        )
    else:
        request = ChatCompletionRequest.model_validate(body)
    return (await online.render_chat(request))[1][0]["prompt_token_ids"]


def tokenizer(folder):
    """What AutoTokenizer gives; vLLM's own where it has loaded it already."""
    from transformers import AutoTokenizer

    if folder in renderers:
        return renderers[folder].renderer.tokenizer
    if folder not in tokenizers:
        tokenizers[folder] = AutoTokenizer.from_pretrained(folder)
    return tokenizers[folder]


def apply_chat_template(ask):
    made = tokenizer(ask["tokenizer"]).apply_chat_template(
        ask["chat"], tools=ask.get("tools"), tokenize=True, add_generation_prompt=True, return_dict=False
    )
    return list(made)


async def main():
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        ask = json.loads(line)
        try:
            answer = list(await render(ask)) if "path" in ask else apply_chat_template(ask)
        except Exception as error:
            answer = f"{type(error).__name__}: {error}"[:500]
        print(json.dumps(answer), file=answers, flush=True)


asyncio.run(main())
