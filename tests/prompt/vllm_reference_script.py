"""Tokenize requests with vLLM's own request types and renderer, without an engine. Run by vLLM's Python:

    python vllm_reference_script.py < requests.jsonl > results.jsonl

A request is {"tokenizer": directory, "path": …, "body": {…}}. A result is a list of token ids, or {"error": message}.
"""

import asyncio
import json
import os
import sys
import tempfile
from typing import Any

os.environ["VLLM_LOGGING_LEVEL"] = "CRITICAL"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

MODEL_CONFIG = {
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
renderers: dict[str, Any] = {}


def renderer(folder: str) -> Any:
    if folder not in renderers:
        from vllm.config import ModelConfig, VllmConfig
        from vllm.renderers import renderer_from_config
        from vllm.renderers.online_renderer import OnlineRenderer

        copy = tempfile.mkdtemp()
        for name in os.listdir(folder):
            if name != "config.json":
                os.symlink(os.path.join(folder, name), os.path.join(copy, name))
        with open(os.path.join(copy, "config.json"), "w") as file:
            json.dump(MODEL_CONFIG, file)
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


async def render(request: dict[str, Any]) -> Any:
    from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

    online, path, body = renderer(request["tokenizer"]), request["path"], request["body"]
    if path == "/v1/completions":
        return (await online.render_completion(CompletionRequest.model_validate(body)))[0]["prompt_token_ids"]
    if path == "/v1/responses":
        rendered = await online.render_responses(ResponsesRequest.model_validate(body))
        return rendered.engine_input["prompt_token_ids"]
    if path == "/v1/messages":
        serving = object.__new__(AnthropicServingMessages)
        serving.online_renderer, serving.model_config = online, online.model_config
        chat = AnthropicServingMessages.to_chat_completion_request(
            AnthropicMessagesRequest.model_validate(body),
            merge_inline_system=AnthropicServingMessages._should_merge_inline_system(online),
            disabled_thinking_effort=await serving._probe_disabled_thinking_effort(),
        )
    else:
        chat = ChatCompletionRequest.model_validate(body)
    return (await online.render_chat(chat))[1][0]["prompt_token_ids"]


async def main() -> None:
    results, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        request = json.loads(line)
        try:
            result: Any = list(await render(request))
        except Exception as error:
            result = {"error": f"{type(error).__name__}: {error}"[:500]}
        print(json.dumps(result), file=results, flush=True)


asyncio.run(main())
