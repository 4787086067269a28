"""One generation, from the request's body to the end of the response.

The simulated model decides its whole output when the request arrives. The engine core decides when each token comes.
With max_tokens or ignore_eos the output has that length (`length`). Otherwise it ends by itself (`stop`) after a random
length, which depends on the seed and the prompt. So all engines with the same seed give the same output for a prompt.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from array import array
from collections.abc import Callable
from hashlib import blake2b
from random import Random
from typing import Any

import msgspec

from warmroute.edge.async_handler import Responder
from warmroute.fake_engine.core import EngineRequest, Finished, TokenContent
from warmroute.fake_engine.server import messages_api, responses_api, vllm_errors
from warmroute.fake_engine.server.fake_tokenizer import Tokenizer
from warmroute.fake_engine.server.kv_transfers import KvTransfers, TransferFailed
from warmroute.fake_engine.server.messages_api import CountTokensRequest, MessagesFormat, MessagesRequest
from warmroute.fake_engine.server.rank import Rank
from warmroute.fake_engine.server.request_bodies import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    check_messages,
)
from warmroute.fake_engine.server.response_bodies import OpenAIFormat, ResponseFormat, Usage, json_text
from warmroute.fake_engine.server.responses_api import ResponsesFormat, ResponsesRequest


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
        prompt = self.chat_tokens(responses_api.chat_messages(body), responses_api.chat_tools(body), True)
        return self._plan(body, prompt, body.max_output_tokens)

    def message(self, body: MessagesRequest) -> PlannedResponse:
        return self._plan(body, self.message_tokens(body), body.max_tokens)

    def message_tokens(self, body: CountTokensRequest) -> list[int]:
        self._check(body)
        return self.chat_tokens(messages_api.chat_messages(body), messages_api.chat_tools(body), True)

    def chat_tokens(self, messages: list[dict[str, Any]], tools: Any, generation_prompt: bool) -> list[int]:
        check_messages(messages)
        try:
            text = self.tokenizer.render(messages, tools, generation_prompt)
        except Exception as error:  # a template can raise anything
            raise vllm_errors.bad_request(str(error)) from None
        return self.tokenizer.encode(text)

    def completion(self, body: CompletionRequest) -> PlannedResponse:
        self._check(body)
        return self._plan(body, self._prompt_tokens(body), body.max_tokens)

    def check_model(self, model: str | None) -> None:
        if model is not None and model != self.model and model not in self.loras:
            raise vllm_errors.unknown_model(model)

    def _check(self, body: GenerationRequest) -> None:
        self.check_model(body.model)
        if body.n not in (1, None):
            raise vllm_errors.bad_request("The simulated engine generates one choice: n must be 1.", "n")

    def _prompt_tokens(self, body: CompletionRequest) -> list[int]:
        prompt = body.prompt
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
            if len(prompt) > 1:
                raise vllm_errors.bad_request("The simulated engine takes one prompt per request.", "prompt")
            prompt = prompt[0]
        if isinstance(prompt, str):
            tokens = self.tokenizer.encode(prompt, add_special_tokens=True)
        else:
            try:
                tokens = msgspec.convert(prompt, list[int])
            except msgspec.ValidationError as error:
                raise vllm_errors.bad_body(f"`prompt` is neither a text nor a list of tokens: {error}") from None
            unknown = next((token for token in tokens if not 0 <= token < self.tokenizer.vocabulary), None)
            if unknown is not None:
                raise vllm_errors.bad_request(f"Token id {unknown} is out of vocabulary", "prompt")
        if not tokens:
            raise vllm_errors.bad_request("The decoder prompt cannot be empty", "prompt")
        return tokens

    def _plan(self, body: GenerationRequest, prompt: list[int], max_tokens: int | None) -> PlannedResponse:
        room = self.max_model_len - len(prompt)
        if room < 1 or (max_tokens or 1) > room:
            raise vllm_errors.too_long(self.max_model_len, len(prompt), max_tokens or 0)
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

    `early_event`: what a stream sends at once (see faults.py). `kv_transfers`: set if the engine has a KV connector."""
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
        error = vllm_errors.internal_error()
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
