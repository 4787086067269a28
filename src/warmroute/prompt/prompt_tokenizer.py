"""Make a prompt from a request body: the exact tokens that the engine will prefill, or as many as are certain.

    prompt_tokenizer = PromptTokenizer(load_tokenizer(path))  # in a thread: it takes seconds
    job = prompt_tokenizer.begin(path, body)  # cheap: finds the fields and the cached prefix
    prompt = job.run()  # on the event loop, or in a thread if job.cost_ms is high

A chat (OpenAI's or Anthropic's) whose prefix is cached costs only its new messages. `exact_tokens` never counts a token
that the engine might not have. Without a tokenizer, the prompt's text is used instead of tokens.
"""

from __future__ import annotations

from functools import partial
from math import inf
from typing import Any, Final

import msgspec

from warmroute._kernel import Outline, digest
from warmroute.prompt import other_apis
from warmroute.prompt.chat_template import ContentFormat, Message, TemplateRejected
from warmroute.prompt.chat_tokenizer import CachedContext, ChatPlan, ChatTokenizer
from warmroute.prompt.plain_chats import MESSAGE_MS
from warmroute.prompt.prompt import Prompt, exact_prompt, is_prompt_list, read_prompts
from warmroute.prompt.request_body import (
    NO_TOKENIZER,
    BodyMessages,
    ConvertedMessages,
    ConvertItem,
    Endpoint,
    RequestBody,
    read_request_body,
    text_prompt_of,
)
from warmroute.prompt.template_messages import (
    EngineOptions,
    RenderContext,
    Templates,
    UnsupportedRequest,
    render_context,
    template_message,
)
from warmroute.prompt.tokenizer import Tokenizer, pack_token_ids

CACHE_BYTES: Final = 128 << 20
"""Default memory of one model's tokenized conversations (`prompts.cache_bytes`)."""
_SAMPLE_EVERY: Final = 64
"""One of this many requests with a cached prefix is kept for `verify_sample`."""
_LONG_FIELD_BYTES: Final = 64
"""A longer field enters the key as a hash."""
MAX_MESSAGES: Final = 10_000
"""A longer conversation is matched by its text: to render it would take seconds."""
TEMPLATE_REJECTS: Final = "the chat template rejects the conversation"

_CHAT_PATH: Final = Endpoint.CHAT.value
_CHAT_ENDPOINTS: Final = (Endpoint.CHAT, Endpoint.MESSAGES)
_RENDER_FIELDS: Final = (
    "chat_template", "chat_template_kwargs", "add_generation_prompt", "continue_final_message", "add_special_tokens",
)  # fmt: skip
_CONTEXT_FIELDS: Final = {
    Endpoint.CHAT: ("tools", "tool_choice", "documents", "reasoning_effort", *_RENDER_FIELDS),
    Endpoint.MESSAGES: ("system", "tools", "thinking", "output_config", "chat_template_kwargs"),
    Endpoint.EMBEDDING: _RENDER_FIELDS,
}
"""Fields that change the text of a conversation, besides its messages."""

# Measured by bench/decision_latency.py, rounded up.
# Milliseconds of `TokenizeJob.run` without encoding: fixed, for each byte of the body, and for a context that is not
# cached.
_COST_MS: Final = 0.2
_COST_MS_PER_BODY_BYTE: Final = 1.5e-6
_COST_MS_OF_A_NEW_CONTEXT: Final = 6.0


def max_text_prompt_bytes(max_ms: float) -> int:
    """Return the size of the largest body whose text prompt takes at most this long."""
    return int((max_ms - _COST_MS) / _COST_MS_PER_BODY_BYTE)


class TokenizeJob(msgspec.Struct, eq=False):
    """A request whose fields and cached prefix are known. `run()` makes its prompt."""

    _tokenizer: PromptTokenizer
    request: RequestBody
    plan: ChatPlan | None = None
    problem: str = ""

    @property
    def is_warm(self) -> bool:
        """Whether the tokens of a part of the conversation are cached."""
        return self.plan is not None and self.plan.is_warm

    @property
    def cost_ms(self) -> float:
        """The estimated duration of `run()`. To ask for it takes up to 0.3 ms: a long new text is sampled."""
        body_bytes = len(self.request.body)
        cost_ms = _COST_MS + _COST_MS_PER_BODY_BYTE * body_bytes
        tokenizer = self._tokenizer.tokenizer
        if tokenizer is None or self.problem:
            return cost_ms
        plan = self.plan
        if plan is None and self.request.endpoint in _CHAT_ENDPOINTS:
            return cost_ms + _COST_MS_OF_A_NEW_CONTEXT + tokenizer.worst_ms_per_byte * body_bytes
        if plan is None:
            return cost_ms + tokenizer.estimate_encode_ms(self.request.body, [(0, body_bytes)])
        cost_ms += MESSAGE_MS * plan.new_messages
        if plan.plain is not None:
            return cost_ms + tokenizer.worst_ms_per_byte * plan.new_bytes  # `tokenize_plain` has sampled it
        end = self.request.fields["messages"][1]
        return cost_ms + tokenizer.estimate_encode_ms(self.request.body, [(end - plan.new_bytes, end)])

    def run(self) -> Prompt:
        return self._tokenizer.finish(self)


class PromptTokenizer:
    """Tokenizes the prompts of one model. Thread-safe. Creating one takes a second: it checks the chat template."""

    def __init__(
        self, tokenizer: Tokenizer | None, engine: EngineOptions | None = None, cache_bytes: int = CACHE_BYTES
    ) -> None:
        self.tokenizer = tokenizer
        self.chats: ChatTokenizer | None = None
        self._engine = engine or EngineOptions()
        self._warm_requests = self._plain_requests = 0
        self._sample: RequestBody | None = None
        self._effort_without_thinking: dict[str, str] = {}
        if tokenizer is not None:
            self.chats = ChatTokenizer(tokenizer, cache_bytes)
            self._templates = Templates(tokenizer.templates, tokenizer.special_tokens, self._engine)
            try:
                # The context of a chat without tools is prepared now, in the loader's thread. Its checks take a second,
                # which the first request must not pay.
                request = read_request_body(b"/v1/chat/completions", b"{}")
                assert request is not None
                self._add_context(self.chats, request)
            except UnsupportedRequest:
                pass

    @property
    def disabled_template_reason(self) -> str:
        """Why the router no longer renders a chat template of this model; empty if it does."""
        return self._templates.disabled_reason if self.tokenizer is not None else ""

    def begin(self, path: bytes, body: bytes, outline: Outline | None = None) -> TokenizeJob | None:
        """Return None for a path without prompts, or for a body that cannot be read.

        `outline`: of the body, where the caller has it already.
        """
        request = read_request_body(path, body, outline)
        return None if request is None else self._begin(request)

    def tokenize_plain(self, path: bytes, body: bytes, outline: Outline | None, max_ms: float = inf) -> Prompt | None:
        """Tokenize a chat of plain messages, most of which some request had before: the quickest way.

        Return None for any other request, and where that may take longer than `max_ms`.
        """
        if outline is None or path != _CHAT_PATH or self.chats is None or outline.has_prompt_options:
            return None
        context = self.chats.cached_context(outline.chat_context())
        if context is None or context.plain_layout is None:
            return None
        prompt = self.chats.plain_chats.tokenize(context.plain_layout, outline, body, max_ms)
        if prompt is not None:
            self._plain_requests += 1
            # Probes cannot contain everything that a template might depend on. Real traffic shows it, by its own
            # samples.
            if self._plain_requests % _SAMPLE_EVERY == 1:
                self._sample = RequestBody(Endpoint.CHAT, body, outline)
            prompt.cache_salt = outline.cache_salt
        return prompt

    def tokenize(self, path: bytes, body: bytes, outline: Outline | None = None) -> Prompt | None:
        job = self.begin(path, body, outline)
        return None if job is None else job.run()

    def verify_sample(self) -> bool | None:
        """Tokenize a recent request again, with and without the cache. To be called in a thread now and then.

        Return False if the tokens differ; conversations with this template are then tokenized as a whole from now on.
        Return None if there is nothing to compare.
        """
        request, self._sample = self._sample, None
        if request is None or self.chats is None:
            return None
        plan = self._begin(request).plan
        if plan is None:
            return None
        try:
            result = self.chats.tokenize(plan)
            if result.media:
                return None
            if result.tokens == self.chats.tokenize_without_cache(plan):
                return True
        except (UnsupportedRequest, TemplateRejected, UnicodeEncodeError):
            return None
        self.chats.disable(plan)
        return False

    # ---- The cheap part, before a job runs ----

    def _begin(self, request: RequestBody) -> TokenizeJob:
        job = TokenizeJob(self, request)
        if self.chats is not None and request.endpoint in _CHAT_ENDPOINTS:
            try:
                context = self.chats.cached_context(self._context_key(request))
                job.plan = None if context is None else self._plan(self.chats, request, context)
            except UnsupportedRequest as problem:
                job.problem = str(problem)
        return job

    def _plan(self, chats: ChatTokenizer, request: RequestBody, context: CachedContext) -> ChatPlan:
        span = request.fields.get("messages")
        if span is None or request.body[span[0]] != ord("["):
            raise UnsupportedRequest("messages is not a list")
        format = context.context.content_format
        convert: ConvertItem = partial(_convert_chat_message, format)
        if request.endpoint is Endpoint.MESSAGES:
            moves_system = other_apis.moves_system_messages(context.context.template.source)
            convert = partial(_convert_anthropic_message, format, moves_system)
        spans = request.outline.message_spans
        if len(spans) > 8 * MAX_MESSAGES:
            raise UnsupportedRequest("the conversation has too many messages")
        messages = BodyMessages(request.body, span, spans, convert)
        is_chat = request.endpoint is Endpoint.CHAT and not request.outline.has_prompt_options
        return chats.plan(context, messages, request.outline if is_chat else None)

    @staticmethod
    def _context_key(request: RequestBody) -> bytes:
        """Return a key made of the bytes of the fields that change the context."""
        if request.endpoint is Endpoint.CHAT:
            return request.outline.chat_context()
        material, body = [request.endpoint.value], request.body
        for name in _CONTEXT_FIELDS[request.endpoint]:
            if (span := request.fields.get(name)) is not None:
                start, end = span
                is_short = end - start <= _LONG_FIELD_BYTES
                material += name.encode(), body[start:end] if is_short else digest(body, start, end)
        text = b"\0".join(material)
        return digest(text, 0, len(text))

    def _add_context(self, chats: ChatTokenizer, request: RequestBody) -> CachedContext:
        """Takes milliseconds: tail rendering is checked with the request's tools and variables."""
        names = _CONTEXT_FIELDS[request.endpoint]
        size = sum(end - start for start, end in (request.fields[name] for name in names if name in request.fields))
        context, leading_messages, special = self._build_context(request.endpoint, request.values(names))
        cached = chats.add_context(self._context_key(request), size, context, leading_messages, special)
        if request.endpoint is Endpoint.MESSAGES:
            other_apis.moves_system_messages(context.template.source)  # so that it is known on the event loop
        return cached

    def _build_context(self, endpoint: Endpoint, fields: dict[str, Any]) -> tuple[RenderContext, list[Message], bool]:
        """Return the context, the leading messages, and whether special tokens are added."""
        if endpoint is Endpoint.MESSAGES:
            leading_messages = other_apis.system_messages(fields.get("system"))
            effort = self._find_effort_without_thinking(fields)
            context = self._render_context(other_apis.anthropic_chat_fields(fields, effort))
            return context, [template_message(message, context.content_format) for message in leading_messages], False
        if endpoint is Endpoint.EMBEDDING:
            fields = {"add_generation_prompt": False, **fields}
        special = fields.pop("add_special_tokens", False)
        if not isinstance(special, bool):
            raise UnsupportedRequest("add_special_tokens is neither true nor false")
        return self._render_context(fields), [], special

    def _render_context(self, fields: dict[str, Any]) -> RenderContext:
        if self.tokenizer is not None and self.tokenizer.chat_inexact_reason:
            raise UnsupportedRequest(self.tokenizer.chat_inexact_reason)
        return render_context(fields, self._templates, self._engine)

    def _find_effort_without_thinking(self, fields: dict[str, Any]) -> str:
        thinking = fields.get("thinking")
        if not isinstance(thinking, dict) or thinking.get("type") != "disabled":
            return "none"
        efforts, source = self._effort_without_thinking, self._templates.choose(None, has_tools=False).source
        if source not in efforts:
            efforts[source] = other_apis.effort_without_thinking(self._render_with_effort)
        return efforts[source]

    def _render_with_effort(self, effort: str) -> str:
        context = self._render_context({"reasoning_effort": effort})
        return context.render([context.text_message("user", "Hi")])

    # ---- Running a job ----

    def finish(self, job: TokenizeJob) -> Prompt:
        request, reason = job.request, NO_TOKENIZER
        if self.chats is not None and self.tokenizer is not None:
            try:
                prompt = self._tokenize(self.chats, self.tokenizer, job)
                prompt.skips_cache = request.skips_cache()
                salt = prompt.cache_salt = request.cache_salt()
                self._add_doubts(request, prompt)
                for other in prompt.others:
                    other.cache_salt = salt
                    self._add_doubts(request, other)
                return prompt
            except UnsupportedRequest as problem:
                reason = str(problem)
            except TemplateRejected:
                reason = TEMPLATE_REJECTS
            except UnicodeEncodeError:
                reason = "the text cannot be encoded as UTF-8"
        return text_prompt_of(request, reason, request.cache_salt())

    def _add_doubts(self, request: RequestBody, prompt: Prompt) -> None:
        """Note where the engine may have other tokens than these."""
        assert self.tokenizer is not None
        if request.may_be_truncated(prompt.token_count, self._engine.max_model_len):
            prompt.truncated = True
            prompt.exact_tokens, prompt.inexact_reason = 0, "the engine may truncate or pad the prompt"
        if self.tokenizer.inexact_reason:
            prompt.exact, prompt.exact_tokens = False, 0
            prompt.inexact_reason = self.tokenizer.inexact_reason

    def _tokenize(self, chats: ChatTokenizer, tokenizer: Tokenizer, job: TokenizeJob) -> Prompt:
        request, plan = job.request, job.plan
        if job.problem:
            raise UnsupportedRequest(job.problem)
        if request.endpoint is Endpoint.COMPLETION:
            for name in ("prompt_embeds", "suffix"):
                if request.value(name) is not None:
                    raise UnsupportedRequest(f"the completion has {name}")
            return _tokenize_text(tokenizer, request, request.value("prompt"))
        if request.endpoint is Endpoint.EMBEDDING:
            items = request.value("messages" if "messages" in request.fields else "input")
            if not isinstance(items, list) or not items or not isinstance(items[0], dict):
                return _tokenize_text(tokenizer, request, items)
            fields = request.values(_CONTEXT_FIELDS[request.endpoint])
            context, _none, special = self._build_context(request.endpoint, fields)
            plan = self._plan_parsed(chats, context, items, special, sort_tool_calls=True)
        elif request.endpoint is Endpoint.RESPONSES:
            fields = request.values(request.fields)
            context = self._render_context(other_apis.responses_chat_fields(fields))
            messages = other_apis.responses_chat_messages(fields.get("instructions"), fields.get("input"))
            plan = self._plan_parsed(chats, context, messages, True, sort_tool_calls=False)
        transfer = request.value("kv_transfer_params")
        if isinstance(transfer, dict) and transfer.get("prompt_token_ids") is not None:
            raise UnsupportedRequest("the request brings token ids from another prefill")
        if plan is None:
            plan = self._plan(chats, request, self._add_context(chats, request))
        if job.is_warm:
            self._warm_requests += 1
            if self._warm_requests % _SAMPLE_EVERY == 1:
                self._sample = request
        return chats.tokenize(plan)

    @staticmethod
    def _plan_parsed(
        chats: ChatTokenizer, context: RenderContext, messages: list[Message], special: bool, sort_tool_calls: bool
    ) -> ChatPlan:
        """Plan a request that had to be parsed as a whole."""
        material = repr((context.identity(), special, sort_tool_calls)).encode("utf-8", "surrogatepass")
        key = digest(material, 0, len(material))
        cached = chats.cached_context(key) or chats.add_context(key, len(material), context, [], special)
        convert = partial(_convert_chat_message, cached.context.content_format, sort_tool_calls=sort_tool_calls)
        return chats.plan(cached, ConvertedMessages(messages, convert))


def _tokenize_text(tokenizer: Tokenizer, request: RequestBody, prompt: Any) -> Prompt:
    """Tokenize a text or token ids, or several of them."""
    if is_prompt_list(prompt):
        return read_prompts(prompt, partial(_tokenize_item, tokenizer, request))
    return _tokenize_item(tokenizer, request, prompt)


def _tokenize_item(tokenizer: Tokenizer, request: RequestBody, prompt: Any) -> Prompt:
    if isinstance(prompt, str):
        tokens = tokenizer.encode(prompt, request.value("add_special_tokens") is not False)
    elif isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        try:
            tokens = pack_token_ids(prompt)
        except OverflowError:
            raise UnsupportedRequest("a token id is out of range") from None
    else:
        raise UnsupportedRequest("the prompt is neither text nor token ids")
    return exact_prompt(tokens)


def _convert_chat_message(format: ContentFormat, item: Any, sort_tool_calls: bool = True) -> list[Message]:
    return [template_message(item, format, sort_tool_calls)]


def _convert_anthropic_message(format: ContentFormat, moves_system_messages: bool, item: Any) -> list[Message]:
    if moves_system_messages and isinstance(item, dict) and item.get("role") == "system":
        raise UnsupportedRequest("the engine moves a system message to the front")
    return [template_message(message, format) for message in other_apis.anthropic_chat_messages(item)]
