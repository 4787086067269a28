"""OpenAI's embeddings API (`/v1/embeddings`): each input is prefilled, and gets a vector that its tokens decide."""

from __future__ import annotations

import asyncio
import base64
import os
import struct
import time
from array import array
from hashlib import blake2b
from random import Random
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from warmroute.edge.async_handler import Responder
from warmroute.fake_engine.core import EngineRequest, Finished, TokenContent
from warmroute.fake_engine.server import vllm_errors
from warmroute.fake_engine.server.fake_tokenizer import Tokenizer
from warmroute.fake_engine.server.rank import Rank

DIMENSIONS = 64
"""Of a vector, if the request does not set `dimensions`."""
MAX_INPUTS = 2048
"""As OpenAI's API."""


class EmbeddingsRequest(Struct, kw_only=True):
    input: str | list[Any]
    """A text, a list of token ids, or a list of texts or token lists."""
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Meta(ge=1, le=4096)] | None = None
    priority: int = 0
    cache_salt: str | None = None


def input_tokens(body: EmbeddingsRequest, tokenizer: Tokenizer, max_model_len: int) -> list[list[int]]:
    """Return the tokens of each input. Raises ApiError."""
    inputs = body.input
    if isinstance(inputs, str) or (inputs and isinstance(inputs[0], int)):
        inputs = [inputs]
    if not 0 < len(inputs) <= MAX_INPUTS:
        raise vllm_errors.bad_request(f"`input` must have 1 to {MAX_INPUTS} items", "input")
    found = []
    for item in inputs:
        if isinstance(item, str):
            tokens = tokenizer.encode(item, add_special_tokens=True)
        else:
            try:
                tokens = msgspec.convert(item, list[int])
            except msgspec.ValidationError as error:
                raise vllm_errors.bad_body(f"`input` is neither text nor a list of tokens: {error}") from None
        if not tokens or not all(0 <= token < tokenizer.vocabulary for token in tokens):
            raise vllm_errors.bad_request("An input is empty, or has a token id out of vocabulary", "input")
        if len(tokens) > max_model_len - 1:
            raise vllm_errors.too_long(max_model_len, len(tokens), 0)
        found.append(tokens)
    return found


async def respond(
    body: EmbeddingsRequest, inputs: list[list[int]], model: str, lora_name: str | None, rank: Rank, request_id: str,
    responder: Responder, block_size: int,
) -> None:  # fmt: skip
    """Prefill each input, then answer. A cancellation or an error aborts them in the engine."""
    waiting = _Prefills(responder, len(inputs))
    keys = []
    try:
        for tokens in inputs:
            key = f"{request_id}-{os.urandom(4).hex()}"
            keys.append(key)
            content = TokenContent([*tokens, 0], block_size, lora_name=lora_name, cache_salt=body.cache_salt)
            request = EngineRequest(
                key, len(tokens), 1, content, priority=body.priority, lora_name=lora_name, cache_salt=body.cache_salt
            )
            rank.submit(request, 1, "stop", waiting)
        if not await waiting.done:
            return  # the engine restarted
    finally:
        for key in keys:
            rank.abort(key)
    dimensions = body.dimensions or DIMENSIONS
    data = [
        {"index": number, "object": "embedding", "embedding": _encoded(_vector(tokens, model, dimensions), body)}
        for number, tokens in enumerate(inputs)
    ]
    prompt_tokens = sum(map(len, inputs))
    usage = {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens, "completion_tokens": 0}
    answer = {
        "id": f"embd-{request_id}",
        "object": "list",
        "created": int(time.time()),
        "model": model,
        "data": data,
        "usage": {**usage, "prompt_tokens_details": None},
    }
    responder.reply(200, msgspec.json.encode(answer), headers=(("X-Request-Id", request_id),))


class _Prefills:
    """Waits for the prefill of several inputs. Implements rank.TokenSink."""

    def __init__(self, responder: Responder, left: int) -> None:
        self._responder = responder
        self._left = left
        self.done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        """Whether all inputs are prefilled."""

    def first_token(self, cached_tokens: int) -> None:
        """An embedding comes with the end of the prefill."""

    def next_token(self) -> None:
        """There is none."""

    def finished(self, outcome: Finished) -> None:
        self._left -= 1
        if not self._left and not self.done.done():
            self.done.set_result(True)

    def engine_restarted(self) -> None:
        if not self.done.done():
            self._responder.close_unfinished()
            self.done.set_result(False)


def _vector(tokens: list[int], model: str, dimensions: int) -> list[float]:
    """Return a vector of length 1: equal tokens of a model have equal vectors."""
    seed = blake2b(array("I", tokens).tobytes() + model.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    random = Random(seed)
    values = [random.gauss(0, 1) for _ in range(dimensions)]
    length = sum(value * value for value in values) ** 0.5
    return [value / length for value in values]


def _encoded(vector: list[float], body: EmbeddingsRequest) -> Any:
    if body.encoding_format == "float":
        return vector
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
