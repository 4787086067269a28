"""One request of the simulated engine, from its body to the end of its response."""

from __future__ import annotations

import asyncio
import base64
import math
import os
import struct
import time
from array import array
from collections.abc import Callable
from hashlib import blake2b
from random import Random
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from warmroute.edge.async_handler import Responder
from warmroute.lab.engine import api_bodies
from warmroute.lab.engine.api_bodies import (
    ChatRequest,
    CompletionRequest,
    CountTokensRequest,
    GenerationRequest,
    MessagesFormat,
    MessagesRequest,
    OpenAIFormat,
    ResponseFormat,
    ResponsesFormat,
    ResponsesRequest,
    Usage,
    check_messages,
    json_text,
)
from warmroute.lab.engine.blocks import TokenContent
from warmroute.lab.engine.rank import KvTransfers, Rank, TransferFailed
from warmroute.lab.engine.tokenizers import Tokenizer
from warmroute.lab.engine.values import EngineRequest, Finished

# One generation, from the request's body to the end of the response.
#
# The simulated model decides its whole output when the request arrives. The engine core decides when each token comes.
# With max_tokens or ignore_eos the output has that length (`length`). Otherwise it ends by itself (`stop`) after a
# random length, which depends on the seed and the prompt. So all engines with the same seed give the same output for a
# prompt.


class PlannedResponse(msgspec.Struct):
    """A validated request, with the output that it will get."""

    body: GenerationRequest
    model: str
    lora_name: str | None
    prompt: list[int]
    output: list[int]
    texts: list[str]
    """The text of each output token."""
    finish_reason: str
    max_tokens: int
    stream: bool

    def format(self, request_id: str) -> ResponseFormat:
        """Return what encodes the response."""
        body, created = self.body, int(time.time())
        if isinstance(body, ResponsesRequest):
            return ResponsesFormat(request_id, created, self.model, body)
        if isinstance(body, MessagesRequest):
            return MessagesFormat(request_id, self.model, len(self.prompt))
        include_usage = body.stream_options is not None and body.stream_options.include_usage
        return OpenAIFormat(isinstance(body, ChatRequest), request_id, created, self.model, include_usage)


class ResponsePlanner:
    """Validates requests and decides their outputs. Raises ApiError."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        model: str,
        loras: tuple[str, ...],
        max_model_len: int,
        seed: int,
        mean_output_tokens: int,
    ) -> None:
        self.tokenizer = tokenizer
        self.model = model
        self.loras = loras
        self.max_model_len = max_model_len
        self._seed = seed
        self._mean_output_tokens = mean_output_tokens

    def chat(self, body: ChatRequest) -> PlannedResponse:
        self._check(body)
        prompt = self.chat_tokens(body.messages, body.tools, body.add_generation_prompt)
        return self._plan(body, prompt, body.max_completion_tokens or body.max_tokens)

    def response(self, body: ResponsesRequest) -> PlannedResponse:
        self._check(body)
        prompt = self.chat_tokens(api_bodies.responses_chat_messages(body), api_bodies.responses_chat_tools(body), True)
        return self._plan(body, prompt, body.max_output_tokens)

    def message(self, body: MessagesRequest) -> PlannedResponse:
        return self._plan(body, self.message_tokens(body), body.max_tokens)

    def message_tokens(self, body: CountTokensRequest) -> list[int]:
        self._check(body)
        return self.chat_tokens(api_bodies.messages_chat_messages(body), api_bodies.messages_chat_tools(body), True)

    def chat_tokens(self, messages: list[dict[str, Any]], tools: Any, generation_prompt: bool) -> list[int]:
        check_messages(messages)
        try:
            text = self.tokenizer.render(messages, tools, generation_prompt)
        except Exception as error:  # a template can raise anything
            raise api_bodies.bad_request(str(error)) from None
        return self.tokenizer.encode(text)

    def completion(self, body: CompletionRequest) -> PlannedResponse:
        self._check(body)
        return self._plan(body, self._prompt_tokens(body), body.max_tokens)

    def check_model(self, model: str | None) -> None:
        if model is not None and model != self.model and model not in self.loras:
            raise api_bodies.unknown_model(model)

    def _check(self, body: GenerationRequest) -> None:
        self.check_model(body.model)
        if body.n not in (1, None):
            raise api_bodies.bad_request("The simulated engine generates one choice: n must be 1.", "n")

    def _prompt_tokens(self, body: CompletionRequest) -> list[int]:
        prompt = body.prompt
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
            if len(prompt) > 1:
                raise api_bodies.bad_request("The simulated engine takes one prompt per request.", "prompt")
            prompt = prompt[0]
        if isinstance(prompt, str):
            tokens = self.tokenizer.encode(prompt, add_special_tokens=True)
        else:
            try:
                tokens = msgspec.convert(prompt, list[int])
            except msgspec.ValidationError as error:
                raise api_bodies.bad_body(f"`prompt` is neither a text nor a list of tokens: {error}") from None
            unknown = next((token for token in tokens if not 0 <= token < self.tokenizer.vocabulary), None)
            if unknown is not None:
                raise api_bodies.bad_request(f"Token id {unknown} is out of vocabulary", "prompt")
        if not tokens:
            raise api_bodies.bad_request("The decoder prompt cannot be empty", "prompt")
        return tokens

    def _plan(self, body: GenerationRequest, prompt: list[int], max_tokens: int | None) -> PlannedResponse:
        room = self.max_model_len - len(prompt)
        if room < 1 or (max_tokens or 1) > room:
            raise api_bodies.too_long(self.max_model_len, len(prompt), max_tokens or 0)
        random = Random(self._output_seed(prompt, body.seed))
        if max_tokens is None and not body.ignore_eos:
            drawn = max(1, round(self._mean_output_tokens * math.exp(random.gauss(-0.18, 0.6))))
            length, ends = min(drawn, room), drawn <= room
        else:
            length, ends = max_tokens or room, False
        output, texts = self.tokenizer.generate(random, length - ends)
        if ends:  # the end-of-turn token counts, and has no text
            output.append(self.tokenizer.end_of_turn)
            texts.append("")
        return PlannedResponse(
            body=body,
            model=body.model or self.model,
            lora_name=body.model if body.model in self.loras else None,
            prompt=prompt,
            output=output,
            texts=texts,
            finish_reason="stop" if ends else "length",
            max_tokens=max_tokens or room,
            stream=bool(body.stream),
        )

    def _output_seed(self, prompt: list[int], seed: int | None) -> int:
        digest = blake2b(array("I", prompt).tobytes(), digest_size=8)
        digest.update(f"{self._seed} {seed}".encode())
        return int.from_bytes(digest.digest(), "big")


async def respond(
    planned: PlannedResponse,
    rank: Rank,
    request_id: str,
    responder: Responder,
    block_size: int,
    early_event: str | None = None,
    kv_transfers: KvTransfers | None = None,
) -> None:
    """Submit a request to a rank and write its response. A cancellation or an error aborts it in the engine.

    `early_event`: what a stream sends at once (see server.py). `kv_transfers`: set if the engine has a KV connector."""
    writer = _ResponseWriter(planned, request_id, responder, block_size)
    params, salt = planned.body.kv_transfer_params or {}, planned.body.cache_salt
    content = TokenContent(
        planned.prompt + planned.output, block_size, lora_name=planned.lora_name, cache_salt=salt
    )  # fmt: skip
    key = f"{request_id}-{os.urandom(4).hex()}"  # clients choose request ids, and may use one twice
    fetches = kv_transfers is not None and bool(params.get("do_remote_prefill"))
    request = EngineRequest(
        key,
        len(planned.prompt),
        len(planned.output),
        content,
        priority=planned.body.priority,
        lora_name=planned.lora_name,
        cache_salt=salt,
        remote_tokens=len(planned.prompt) if fetches else 0,
    )
    if kv_transfers is not None and params.get("do_remote_decode") and not planned.stream:
        writer.pin = kv_transfers.pin
    if planned.stream:
        # As with uvicorn, the head is sent at once, and the first event with the first token.
        responder.start(200, "text/event-stream; charset=utf-8", (("X-Request-Id", request_id),))
        if early_event is not None:
            writer.send_early(early_event)
    if fetches and kv_transfers is not None:
        try:
            await kv_transfers.fetch(params, len(planned.prompt) - rank.cached_tokens(request))
        except TransferFailed:
            writer.transfer_failed()
            return
    try:
        rank.submit(request, planned.max_tokens, planned.finish_reason, writer)
        await writer.done
    finally:
        rank.abort(key)


class _ResponseWriter:
    """Writes a response as its tokens arrive. Implements rank.TokenSink."""

    __slots__ = (
        "_block_size",
        "_cached_tokens",
        "_format",
        "_next",
        "_planned",
        "_request_id",
        "_responder",
        "_role_sent",
        "done",
        "pin",
    )

    def __init__(self, planned: PlannedResponse, request_id: str, responder: Responder, block_size: int) -> None:
        self._planned = planned
        self._responder = responder
        self._block_size = block_size
        self._request_id = request_id
        self._format = planned.format(request_id)
        self._next = 0
        self._role_sent = False
        self._cached_tokens = 0
        self.pin: Callable[[str, int], dict[str, Any]] | None = None
        """Keeps the KV cache for another engine; None: no request asked for it."""
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def send_early(self, event: str) -> None:
        if event == "early_role":
            self._role_sent = True
            self._responder.write(self._format.start() or b": ping\n\n")
        else:
            self._responder.write(b": ping\n\n")

    def first_token(self, cached_tokens: int) -> None:
        self._cached_tokens = cached_tokens
        if self._planned.stream and not self._responder.ended:
            events = b"" if self._role_sent else self._format.start()
            if len(self._planned.output) > 1:
                events += self._format.token(json_text(self._planned.texts[0]))
            if events:
                self._responder.write(events)
        self._next = 1

    def next_token(self) -> None:
        planned = self._planned
        index = self._next
        self._next = index + 1
        if planned.stream and self._next < len(planned.output) and not self._responder.ended:
            self._responder.write(self._format.token(json_text(planned.texts[index])))

    def finished(self, outcome: Finished) -> None:
        if self.done.done() or self._responder.ended:
            return
        planned = self._planned
        aborted = outcome.reason == "abort"  # the engine was put to sleep
        reason = "abort" if aborted else planned.finish_reason
        usage = self._usage(outcome.output_tokens)
        generated = "".join(planned.texts[: outcome.output_tokens])
        if planned.stream:
            text = b"" if aborted else json_text(planned.texts[-1])
            self._responder.write(self._format.end(text, generated, reason, usage))
            self._responder.end()
        else:
            body = self._format.whole(generated, reason, usage)
            if self.pin is not None and not aborted:
                params = msgspec.json.encode(self.pin(self._format.id, len(planned.prompt)))
                body = body.replace(b'"kv_transfer_params":null', b'"kv_transfer_params":' + params)
            self._responder.reply(200, body, headers=(("X-Request-Id", self._request_id),))
        self.done.set_result(None)

    def transfer_failed(self) -> None:
        """Answer as vLLM does if it cannot load the KV cache: a stream has begun by then."""
        error = api_bodies.internal_error()
        if self._planned.stream:
            self._responder.write(self._format.failed(error))
            self._responder.end()
        else:
            self._responder.reply(error.status, error.body())

    def engine_restarted(self) -> None:
        if not self.done.done():
            self._responder.close_unfinished()
            self.done.set_result(None)

    def _usage(self, output_tokens: int) -> Usage:
        prompt_tokens = len(self._planned.prompt)
        in_full_blocks = prompt_tokens // self._block_size * self._block_size
        chat = isinstance(self._planned.body, ChatRequest)
        created = in_full_blocks - self._cached_tokens if chat else None
        return Usage(prompt_tokens, output_tokens, self._cached_tokens, created)


# OpenAI's embeddings API (`/v1/embeddings`): each input is prefilled, and gets a vector that its tokens decide.

DIMENSIONS = 64
"""Dimensions of a vector, if the request does not set `dimensions`."""
MAX_INPUTS = 2048
"""Inputs of one request, as OpenAI's API limits them."""


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
        raise api_bodies.bad_request(f"`input` must have 1 to {MAX_INPUTS} items", "input")
    found = []
    for item in inputs:
        if isinstance(item, str):
            tokens = tokenizer.encode(item, add_special_tokens=True)
        else:
            try:
                tokens = msgspec.convert(item, list[int])
            except msgspec.ValidationError as error:
                raise api_bodies.bad_body(f"`input` is neither text nor a list of tokens: {error}") from None
        if not tokens or not all(0 <= token < tokenizer.vocabulary for token in tokens):
            raise api_bodies.bad_request("An input is empty, or has a token id out of vocabulary", "input")
        if len(tokens) > max_model_len - 1:
            raise api_bodies.too_long(max_model_len, len(tokens), 0)
        found.append(tokens)
    return found


async def respond_with_embeddings(
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
        """Return the vector: an embedding comes with the end of the prefill."""

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
