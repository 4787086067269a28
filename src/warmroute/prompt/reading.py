"""From a request's body to its prompt: the exact tokens that the engine will prefill, or how far they are sure.

    reader = load_reader(path)                       # in a thread: it takes seconds
    reading = reader.begin(path, body)               # cheap: where things lie, whether the conversation is known
    prompt = reading.prompt()                        # on the loop, or in a thread where reading.cost_ms is high

Chats (OpenAI's and Anthropic's) whose beginning is known cost their new words only. Never claims tokens that the engine
would not have: `sure_tokens` and `doubt` say where knowledge ends. Without a tokenizer, the text stands in for tokens.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, Final

from warmroute._kernel._messages import digest, digests
from warmroute._kernel._scan import Outline
from warmroute.prompt import messages_api, responses_api
from warmroute.prompt.chat_reading import ChatReader, Plan, Prepared, Rendered
from warmroute.prompt.chat_setting import ChatSetting, EngineOptions, Templates, chat_setting
from warmroute.prompt.chat_template import Message, Refused
from warmroute.prompt.content_format import ContentFormat
from warmroute.prompt.conversation import NotFollowed, conversation_message
from warmroute.prompt.message_spans import Convert, ListedUnits, MadeUnits
from warmroute.prompt.prompt import Prompt
from warmroute.prompt.request import NO_TOKENIZER, Request, Shape, request_of
from warmroute.prompt.tokenizer import TOKEN_BYTES, Tokenizer, load_tokenizer, packed

CACHE_BYTES: Final = 128 << 20
_AUDIT_EVERY: Final = 64
"""One in so many warm reads is kept for `audit`."""
_LONG_FIELD: Final = 64

_CONVERSATIONS: Final = (Shape.CHAT, Shape.MESSAGES)
_SETTING_FIELDS: Final = {
    Shape.CHAT: [
        "tools",
        "tool_choice",
        "documents",
        "chat_template",
        "chat_template_kwargs",
        "reasoning_effort",
        "add_generation_prompt",
        "continue_final_message",
        "add_special_tokens",
    ],
    Shape.MESSAGES: ["system", "tools", "thinking", "output_config", "chat_template_kwargs"],
    Shape.EMBEDDING: [
        "chat_template",
        "chat_template_kwargs",
        "add_generation_prompt",
        "continue_final_message",
        "add_special_tokens",
    ],
}
"""Fields that change the text of a conversation, beside its messages."""

# What bench/decision.py measured, rounded up.
_COST_MS: Final = 0.2
_COST_MS_PER_BODY_BYTE: Final = 1.5e-6
_COST_MS_PER_NEW_BYTE: Final = 4e-5
_COST_MS_PER_NEW_BYTE_SLOWLY: Final = 1e-3
"""With `tokenizers` alone."""
_COST_MS_OF_A_SETTING: Final = 6.0


def stand_in_bytes(most_ms: float) -> int:
    """Bodies of up to so many bytes take at most this long where no tokenizer is known."""
    return int((most_ms - _COST_MS) / _COST_MS_PER_BODY_BYTE)


class Reading:
    """A request that has been looked over; `prompt()` does the work, on the loop or in a thread."""

    __slots__ = ("_reader", "plan", "problem", "request")

    def __init__(self, reader: PromptTokenizer, request: Request) -> None:
        self._reader = reader
        self.request = request
        self.plan: Plan | None = None
        self.problem = ""

    @property
    def is_warm(self) -> bool:
        """Whether the beginning of the conversation is known."""
        return self.plan is not None and self.plan.stem is not None

    @property
    def cost_ms(self) -> float:
        """About how long `prompt()` will take."""
        body_bytes = len(self.request.body)
        cost_ms = _COST_MS + _COST_MS_PER_BODY_BYTE * body_bytes
        tokenizer = self._reader.tokenizer
        if tokenizer is None or self.problem:
            return cost_ms
        if self.plan is None and self.request.shape in _CONVERSATIONS:
            cost_ms += _COST_MS_OF_A_SETTING
        new_bytes = body_bytes if self.plan is None else self.plan.new_bytes
        return cost_ms + new_bytes * (_COST_MS_PER_NEW_BYTE_SLOWLY if tokenizer.slow_because else _COST_MS_PER_NEW_BYTE)

    def prompt(self) -> Prompt:
        return self._reader.finish(self)


class PromptTokenizer:
    """Reads prompts for one model. Safe to use from several threads. Takes a second to make: the template is tried
    out.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, engine: EngineOptions | None = None, cache_bytes: int = CACHE_BYTES
    ) -> None:
        self.tokenizer = tokenizer
        self.chats: ChatReader | None = None
        self._engine = engine or EngineOptions()
        self._warm_reads = 0
        self._sample: Request | None = None
        self._efforts: dict[str, str] = {}
        self._moves_system: dict[str, bool] = {}
        if tokenizer is not None:
            self.chats = ChatReader(tokenizer, cache_bytes)
            self._templates = Templates(tokenizer.templates, tokenizer.special_tokens, self._engine)
            try:
                request = request_of(b"/v1/chat/completions", b"{}")
                assert request is not None
                self._prepare(self.chats, request)
            except NotFollowed:
                pass

    def begin(self, path: bytes, body: bytes, outline: Outline | None = None) -> Reading | None:
        """None for a path that has no prompt, or a body that is not to be understood.

        `outline`: the body's, where it is made already.
        """
        request = request_of(path, body, outline)
        return None if request is None else self._begin(request)

    def read(self, path: bytes, body: bytes, outline: Outline | None = None) -> Prompt | None:
        """Both steps at once."""
        reading = self.begin(path, body, outline)
        return None if reading is None else reading.prompt()

    def audit(self) -> bool | None:
        """Reads a request of late once more, without what was remembered. For a thread, now and then.

        False: the tokens differ, and the template's conversations are read in whole from now on. None: nothing to
        check.
        """
        request, self._sample = self._sample, None
        if request is None or self.chats is None:
            return None
        plan = self._begin(request).plan
        if plan is None:
            return None
        try:
            quickly = self.chats.read(plan)
            if quickly.media:
                return None
            if quickly.tokens == self.chats.read_plainly(plan):
                return True
        except (NotFollowed, Refused, UnicodeEncodeError):
            return None
        self.chats.contradict(plan.prepared.locality)
        return False

    # ---- Looking over ----

    def _begin(self, request: Request) -> Reading:
        reading = Reading(self, request)
        if self.chats is not None and request.shape in _CONVERSATIONS:
            try:
                prepared = self.chats.known(self._setting_key(request))
                reading.plan = None if prepared is None else self._plan(self.chats, request, prepared)
            except NotFollowed as problem:
                reading.problem = str(problem)
        return reading

    def _plan(self, chats: ChatReader, request: Request, prepared: Prepared) -> Plan:
        where = request.fields.get("messages")
        if where is None or request.body[where[0]] != ord("["):
            raise NotFollowed("no list of messages")
        format = prepared.setting.format
        convert: Convert = partial(_chat_unit, format)
        if request.shape is Shape.MESSAGES:
            convert = partial(_messages_unit, format, self._system_moves(prepared))
        spans = request.outline.spans
        return chats.plan(prepared, ListedUnits(request.body, where, spans, digests(request.body, spans), convert))

    @staticmethod
    def _setting_key(request: Request) -> bytes:
        """Made of the bytes of the fields that matter."""
        material, body = [request.shape.value], request.body
        for name in _SETTING_FIELDS[request.shape]:
            if (where := request.fields.get(name)) is not None:
                start, end = where
                material += name.encode(), body[start:end] if end - start <= _LONG_FIELD else digest(body, start, end)
        text = b"\0".join(material)
        return digest(text, 0, len(text))

    def _prepare(self, chats: ChatReader, request: Request) -> Prepared:
        """Takes milliseconds: what the request sets is tried out."""
        names = _SETTING_FIELDS[request.shape]
        size = sum(end - start for start, end in (request.fields[name] for name in names if name in request.fields))
        setting, lead, special = self._setting(request.shape, request.values(names))
        prepared = chats.prepare(self._setting_key(request), size, setting, lead, special)
        if request.shape is Shape.MESSAGES:
            self._system_moves(prepared)
        return prepared

    def _setting(self, shape: Shape, fields: dict[str, Any]) -> tuple[ChatSetting, list[Message], bool]:
        """The setting, the messages that go first, and whether special tokens are added."""
        if shape is Shape.MESSAGES:
            lead = messages_api.system_messages(fields.get("system"))
            setting = self._chat_setting(messages_api.chat_fields(fields, self._effort_without_thinking(fields)))
            return setting, [conversation_message(message, setting.format) for message in lead], False
        if shape is Shape.EMBEDDING:
            fields = {"add_generation_prompt": False, **fields}
        special = fields.pop("add_special_tokens", False)
        if not isinstance(special, bool):
            raise NotFollowed("add_special_tokens that is neither true nor false")
        return self._chat_setting(fields), [], special

    def _chat_setting(self, fields: dict[str, Any]) -> ChatSetting:
        if self.tokenizer is not None and self.tokenizer.chat_doubt:
            raise NotFollowed(self.tokenizer.chat_doubt)
        return chat_setting(fields, self._templates, self._engine)

    def _system_moves(self, prepared: Prepared) -> bool:
        template = prepared.setting.template
        if template.source not in self._moves_system:
            self._moves_system[template.source] = messages_api.moves_system_messages(template)
        return self._moves_system[template.source]

    def _effort_without_thinking(self, fields: dict[str, Any]) -> str:
        thinking = fields.get("thinking")
        if not isinstance(thinking, dict) or thinking.get("type") != "disabled":
            return "none"
        source = self._templates.choose(None, has_tools=False).source
        if source not in self._efforts:
            self._efforts[source] = messages_api.effort_without_thinking(self._render_with_effort)
        return self._efforts[source]

    def _render_with_effort(self, effort: str) -> str:
        setting = self._chat_setting({"reasoning_effort": effort})
        return setting.render([conversation_message({"role": "user", "content": "Hi"}, setting.format)])

    # ---- The work ----

    def finish(self, reading: Reading) -> Prompt:
        """What Reading.prompt does."""
        request = reading.request
        prompt = request.about()
        if self.chats is None or self.tokenizer is None:
            prompt.tokens, prompt.exact, prompt.doubt = request.outline.stand_in(), False, NO_TOKENIZER
            return prompt
        try:
            made = self._tokens(self.chats, self.tokenizer, reading, prompt)
            cut = request.may_be_cut(len(made.tokens) // TOKEN_BYTES, self._engine.max_model_len)
        except NotFollowed as problem:
            doubt = str(problem)
        except Refused:
            doubt = "the chat template refuses the conversation"
        except UnicodeEncodeError:
            doubt = "text that has no UTF-8"
        else:
            prompt.tokens, prompt.media, prompt.warm_tokens = made.tokens, made.media, made.warm_tokens
            prompt.sure_tokens, prompt.doubt = made.sure_tokens, made.doubt
            if cut:
                prompt.sure_tokens, prompt.doubt = 0, "the engine may cut or fill the prompt"
            if self.tokenizer.doubt:
                prompt.exact, prompt.sure_tokens, prompt.doubt = False, 0, self.tokenizer.doubt
            return prompt
        prompt.tokens, prompt.exact, prompt.doubt = request.outline.stand_in(), False, doubt
        return prompt

    def _tokens(self, chats: ChatReader, tokenizer: Tokenizer, reading: Reading, prompt: Prompt) -> Rendered:
        request, plan = reading.request, reading.plan
        if reading.problem:
            raise NotFollowed(reading.problem)
        if request.shape is Shape.COMPLETION:
            if given := [name for name in ("prompt_embeds", "suffix") if request.value(name) is not None]:
                raise NotFollowed(f"a completion with {given[0]}")
            return _plain_tokens(tokenizer, request, prompt, request.value("prompt"))
        if request.shape is Shape.EMBEDDING:
            items = request.value("messages" if "messages" in request.fields else "input")
            if not isinstance(items, list) or not items or not isinstance(items[0], dict):
                return _plain_tokens(tokenizer, request, prompt, items)
            setting, _lead, special = self._setting(request.shape, request.values(_SETTING_FIELDS[request.shape]))
            plan = self._plan_of_all(chats, setting, items, special, as_typed=True)
        elif request.shape is Shape.RESPONSES:
            fields = request.values(request.fields)
            setting = self._chat_setting(responses_api.chat_fields(fields))
            messages = responses_api.chat_messages(fields.get("instructions"), fields.get("input"))
            plan = self._plan_of_all(chats, setting, messages, True, as_typed=False)
        transfer = request.value("kv_transfer_params")
        if isinstance(transfer, dict) and transfer.get("prompt_token_ids") is not None:
            raise NotFollowed("token ids from a prefill elsewhere")
        if plan is None:
            plan = self._plan(chats, request, self._prepare(chats, request))
        if reading.is_warm:
            self._warm_reads += 1
            if self._warm_reads % _AUDIT_EVERY == 1:
                self._sample = request
        return chats.read(plan)

    @staticmethod
    def _plan_of_all(
        chats: ChatReader, setting: ChatSetting, messages: list[Message], special: bool, as_typed: bool
    ) -> Plan:
        """Where the whole request had to be parsed."""
        material = repr((setting.identity(), special, as_typed)).encode("utf-8", "surrogatepass")
        key = digest(material, 0, len(material))
        prepared = chats.known(key) or chats.prepare(key, len(material), setting, [], special)
        unit = partial(_chat_unit, prepared.setting.format, as_typed=as_typed)
        return chats.plan(prepared, MadeUnits(messages, unit))


def load_reader(
    path: str | Path, engine: EngineOptions | None = None, cache_bytes: int = CACHE_BYTES
) -> PromptTokenizer:
    """From a directory or a tokenizer.json. Takes seconds: for a thread. Raises OSError or ValueError."""
    return PromptTokenizer(load_tokenizer(path), engine, cache_bytes)


def _plain_tokens(tokenizer: Tokenizer, request: Request, prompt: Prompt, given: Any) -> Rendered:
    """A text, token ids, or several of them."""
    first = given
    if isinstance(given, list) and given and isinstance(given[0], (str, list)):
        first, prompt.prompts = given[0], len(given)
    if isinstance(first, str):
        special = request.value("add_special_tokens")
        tokens = tokenizer.encode(first, special is not False)
    elif isinstance(first, list) and first and all(type(token) is int for token in first):
        try:
            tokens = packed(first)
        except OverflowError:
            raise NotFollowed("token ids out of range") from None
    else:
        raise NotFollowed("a prompt that is neither text nor token ids")
    return Rendered(tokens, len(tokens) // TOKEN_BYTES)


def _chat_unit(format: ContentFormat, item: Any, as_typed: bool = True) -> list[Message]:
    return [conversation_message(item, format, as_typed)]


def _messages_unit(format: ContentFormat, system_moves: bool, item: Any) -> list[Message]:
    if system_moves and isinstance(item, dict) and item.get("role") == "system":
        raise NotFollowed("a system message that the engine moves to the front")
    return [conversation_message(message, format) for message in messages_api.chat_messages(item)]
