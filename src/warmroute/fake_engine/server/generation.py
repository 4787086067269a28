"""One generation, from a request's body to the end of its answer.

The simulated model has its whole answer ready when the request comes in; the engine core decides when each token of it
is there. With max_tokens the answer is that long (`length`), as with ignore_eos; without, it ends of itself (`stop`)
after a length that is drawn from the seed and the prompt. The same prompt gets the same answer from every engine of
the same seed.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from array import array
from hashlib import blake2b
from random import Random
from typing import Any

import msgspec

from warmroute.edge.async_handler import Responder
from warmroute.fake_engine.core import EngineRequest, Finished, TokenContent
from warmroute.fake_engine.server import vllm_errors as errors
from warmroute.fake_engine.server import response_bodies as answers
from warmroute.fake_engine.server.response_bodies import StreamForm, Usage, json_text
from warmroute.fake_engine.server.request_bodies import Chat, Completion, Generate, check_messages
from warmroute.fake_engine.server.rank import Rank
from warmroute.fake_engine.server.fake_tokenizer import Tokenizer


class Planned(msgspec.Struct):
    """A request that was understood, with the answer that it will get."""

    chat: bool
    model: str
    lora_name: str | None
    prompt: list[int]
    answer: list[int]
    texts: list[str]
    reason: str
    max_tokens: int
    stream: bool
    include_usage: bool
    priority: int
    cache_salt: str | None


class Planner:
    """Understands requests to one engine. Raises ApiError."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        model: str,
        loras: tuple[str, ...],
        max_model_len: int,
        seed: int,
        answer_tokens: int,
    ) -> None:
        self.tokenizer = tokenizer
        self.model = model
        self.loras = loras
        self.max_model_len = max_model_len
        self._seed = seed
        self._answer_tokens = answer_tokens

    def chat(self, body: Chat) -> Planned:
        self._check(body)
        prompt = self.chat_tokens(body.messages, body.tools, body.add_generation_prompt)
        return self._plan(body, True, prompt, body.max_completion_tokens or body.max_tokens)

    def chat_tokens(self, messages: list[dict[str, Any]], tools: Any, generation_prompt: bool) -> list[int]:
        check_messages(messages)
        try:
            text = self.tokenizer.render(messages, tools, generation_prompt)
        except Exception as error:  # a model's template may refuse by whatever it likes
            raise errors.bad_request(str(error)) from None
        return self.tokenizer.encode(text)

    def completion(self, body: Completion) -> Planned:
        self._check(body)
        return self._plan(body, False, self._prompt_tokens(body), body.max_tokens)

    def _check(self, body: Generate) -> None:
        if body.model is not None and body.model != self.model and body.model not in self.loras:
            raise errors.unknown_model(body.model)
        if body.n not in (1, None):
            raise errors.bad_request("This simulated engine gives one choice: n must be 1.", "n")

    def _prompt_tokens(self, body: Completion) -> list[int]:
        prompt = body.prompt
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
            if len(prompt) > 1:
                raise errors.bad_request("This simulated engine takes one prompt a request.", "prompt")
            prompt = prompt[0]
        if isinstance(prompt, str):
            tokens = self.tokenizer.encode(prompt, add_special_tokens=True)
        else:
            try:
                tokens = msgspec.convert(prompt, list[int])
            except msgspec.ValidationError as error:
                raise errors.bad_body(f"`prompt` is neither a text nor tokens: {error}") from None
            strange = next((token for token in tokens if not 0 <= token < self.tokenizer.vocabulary), None)
            if strange is not None:
                raise errors.bad_request(f"Token id {strange} is out of vocabulary", "prompt")
        if not tokens:
            raise errors.bad_request("The decoder prompt cannot be empty", "prompt")
        return tokens

    def _plan(self, body: Generate, chat: bool, prompt: list[int], max_tokens: int | None) -> Planned:
        room = self.max_model_len - len(prompt)
        if room < 1 or (max_tokens or 1) > room:
            raise errors.too_long(self.max_model_len, len(prompt), max_tokens or 0)
        random = Random(self._answer_seed(prompt, body.seed))
        if max_tokens is None and not body.ignore_eos:
            drawn = max(1, round(self._answer_tokens * math.exp(random.gauss(-0.18, 0.6))))
            length, ends = min(drawn, room), drawn <= room
        else:
            length, ends = max_tokens or room, False
        answer, texts = self.tokenizer.answer(random, length - ends)
        if ends:  # the token that ends the turn counts, and says nothing
            answer.append(self.tokenizer.end_of_turn)
            texts.append("")
        return Planned(
            chat=chat,
            model=body.model or self.model,
            lora_name=body.model if body.model in self.loras else None,
            prompt=prompt,
            answer=answer,
            texts=texts,
            reason="stop" if ends else "length",
            max_tokens=max_tokens or room,
            stream=bool(body.stream),
            include_usage=body.stream_options is not None and body.stream_options.include_usage,
            priority=body.priority,
            cache_salt=body.cache_salt,
        )

    def _answer_seed(self, prompt: list[int], seed: int | None) -> int:
        digest = blake2b(array("I", prompt).tobytes(), digest_size=8)
        digest.update(f"{self._seed} {seed}".encode())
        return int.from_bytes(digest.digest(), "big")


async def answer(planned: Planned, rank: Rank, request_id: str, responder: Responder, block_size: int) -> None:
    """Has a rank serve it and answers as it goes. Whatever ends this early takes the request out of the engine."""
    hearer = _Hearer(planned, request_id, responder, block_size)
    content = TokenContent(
        planned.prompt + planned.answer, block_size, lora_name=planned.lora_name, cache_salt=planned.cache_salt
    )
    key = f"{request_id}-{os.urandom(4).hex()}"  # clients choose request ids, and may choose one twice
    request = EngineRequest(
        key,
        len(planned.prompt),
        len(planned.answer),
        content,
        priority=planned.priority,
        lora_name=planned.lora_name,
        cache_salt=planned.cache_salt,
    )
    if planned.stream:
        # As uvicorn does: the head goes out at once, the first event with the first token.
        responder.start(200, "text/event-stream; charset=utf-8", (("X-Request-Id", request_id),))
    try:
        rank.submit(request, planned.max_tokens, planned.reason, hearer)
        await hearer.done
    finally:
        rank.abort(key)


class _Hearer:
    """Writes an answer while its tokens come. Implements rank.TokenSink."""

    __slots__ = (
        "_block_size",
        "_cached",
        "_created",
        "_form",
        "_id",
        "_next",
        "_planned",
        "_request_id",
        "_responder",
        "done",
    )

    def __init__(self, planned: Planned, request_id: str, responder: Responder, block_size: int) -> None:
        self._planned = planned
        self._responder = responder
        self._block_size = block_size
        self._request_id = request_id
        self._id = f"{'chatcmpl' if planned.chat else 'cmpl'}-{request_id}"
        self._created = int(time.time())
        self._form = StreamForm(planned.chat, self._id, self._created, planned.model)
        self._next = 0
        self._cached = 0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def began(self, cached_tokens: int) -> None:
        self._cached = cached_tokens
        if self._planned.stream and not self._responder.ended:
            opening = self._form.opening()
            if len(self._planned.answer) > 1:
                opening += self._form.token(json_text(self._planned.texts[0]))
            self._responder.write(opening)
        self._next = 1

    def token(self) -> None:
        planned = self._planned
        index = self._next
        self._next = index + 1
        if planned.stream and self._next < len(planned.answer) and not self._responder.ended:
            self._responder.write(self._form.token(json_text(planned.texts[index])))

    def finished(self, outcome: Finished) -> None:
        if self.done.done() or self._responder.ended:
            return
        planned = self._planned
        aborted = outcome.reason == "abort"  # by the engine: it was put to sleep
        reason = "abort" if aborted else planned.reason
        usage = self._usage(outcome.output_tokens)
        if planned.stream:
            text = b"" if aborted else json_text(planned.texts[-1])
            end = self._form.last_token(text, reason, planned.include_usage)
            if planned.include_usage:
                end += self._form.usage(usage)
            self._responder.write(end + answers.DONE)
            self._responder.end()
        else:
            whole = answers.whole_chat if planned.chat else answers.whole_completion
            text_so_far = "".join(planned.texts[: outcome.output_tokens])
            body = whole(self._id, self._created, planned.model, text_so_far, reason, usage)
            self._responder.reply(200, body, headers=(("X-Request-Id", self._request_id),))
        self.done.set_result(None)

    def cut(self) -> None:
        if not self.done.done():
            self._responder.close_unfinished()
            self.done.set_result(None)

    def _usage(self, output_tokens: int) -> Usage:
        prompt_tokens = len(self._planned.prompt)
        created = prompt_tokens // self._block_size * self._block_size - self._cached if self._planned.chat else None
        return Usage(prompt_tokens, output_tokens, self._cached, created)
