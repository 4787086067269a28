"""Tokenizes only what is new in a conversation."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from warmroute._kernel import TOKEN_BYTES, Outline
from warmroute.prompt.chat_template import ChatTemplate, Message, TemplateRejected
from warmroute.prompt.plain_chats import SYSTEM_ROLE, USER_ROLE, PlainChats, PlainLayout
from warmroute.prompt.prompt import Prompt, exact_prompt
from warmroute.prompt.request_body import MessageList
from warmroute.prompt.tail_rendering import TailCheck, TailRenderer, differs_at_last_cut, may_be_prefix, may_follow
from warmroute.prompt.template_messages import (
    MEDIA_MARK,
    MEDIA_MARK_LENGTH,
    RenderContext,
    UnsupportedRequest,
    as_media_parts,
)
from warmroute.prompt.tokenizer import Tokenizer

# A cache of tokenized conversation prefixes, so that only the messages after a known prefix are rendered and encoded.
#
# A prefix ends with an added token (see Tokenizer.can_cut_after) and stores only the tokens after its parent prefix.
# The cache is bounded in bytes and evicts the least recently used prefix. Using a prefix also marks its parents as
# used, after itself: a parent is always younger than its children, so an evicted prefix never has children in the
# cache.

_OVERHEAD_BYTES: Final = 480
"""Memory of a prefix besides its tokens: the object, its key, its table entry."""


@dataclass(slots=True, eq=False)
class CachedPrefix:
    key: bytes
    parent: CachedPrefix | None
    cut_token: str
    """The added token that `tokens` ends with."""
    text_after_cut: str
    """The rest of the last message's text, after the cut token. `tokens` does not contain it."""
    ends_with_user: bool
    """Whether the last message is a user's. Otherwise it is a tool result."""
    starts_with_system: bool
    clean: bool
    """Whether no message contains a string that the template searches for."""
    tokens: bytes = b""
    """The tokens after the parent's last token."""
    token_bytes: int = 0
    """Size of all tokens from the start of the conversation."""

    def cost_bytes(self) -> int:
        return len(self.tokens) + 4 * len(self.text_after_cut) + _OVERHEAD_BYTES

    def all_tokens(self) -> bytes:
        """Return the tokens from the start of the conversation."""
        parts: list[bytes] = []
        prefix: CachedPrefix | None = self
        while prefix is not None:
            parts.append(prefix.tokens)
            prefix = prefix.parent
        parts.reverse()
        return b"".join(parts)


class TokenCache:
    """Thread-safe."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self._prefixes: OrderedDict[bytes, CachedPrefix] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._prefixes)

    def get(self, key: bytes) -> CachedPrefix | None:
        return self._prefixes.get(key)

    def touch(self, prefix: CachedPrefix) -> None:
        """Mark the prefix and its parents as recently used."""
        with self._lock:
            self._touch(prefix)

    def add(self, prefix: CachedPrefix) -> None:
        """Add the prefix, unless its parent was evicted meanwhile or it is larger than the whole budget."""
        cost = prefix.cost_bytes()
        with self._lock:
            if (known := self._prefixes.get(prefix.key)) is not None:
                self._touch(known)
                return
            if cost > self.budget_bytes:
                return
            # Another thread has evicted the parent. Without it, the tokens before this prefix are lost.
            if prefix.parent is not None and self._prefixes.get(prefix.parent.key) is not prefix.parent:
                return
            self._prefixes[prefix.key] = prefix
            self.used_bytes += cost
            self._touch(prefix)
            while self.used_bytes > self.budget_bytes:
                _key, oldest = self._prefixes.popitem(last=False)
                self.used_bytes -= oldest.cost_bytes()

    def clear(self) -> None:
        with self._lock:
            self._prefixes.clear()
            self.used_bytes = 0

    def _touch(self, prefix: CachedPrefix) -> None:
        at: CachedPrefix | None = prefix
        while at is not None and at.key in self._prefixes:
            self._prefixes.move_to_end(at.key)
            at = at.parent


# Tokenize conversations: only the new messages where the prefix is cached, otherwise the whole conversation.

_CONTEXT_BUDGET_DIVISOR: Final = 8
"""One eighth of the memory budget is for render contexts. Of the rest, one half is for tokens of prefixes, the other
for tokens of plain messages."""
_CONTEXT_BYTES_PER_BODY_BYTE: Final = 12
"""Memory of a context for each byte of its fields in the request: parsed tools, their JSON, the stubs' texts."""
_CONTEXT_OVERHEAD_BYTES: Final = 16_384
"""Memory of a context without tools: the object, its stubs, its layout."""
_MAX_NEW_MESSAGES: Final = 1024
"""How many messages back from the end the search for a cached prefix goes. A tool loop rarely adds more in one
request."""
_CHECK_FIRST: Final = 8
"""A template that is wrong is mostly wrong at once, so the first conversations are all checked."""
_CHECK_EVERY: Final = 32
"""Later, one of this many conversations that are rendered as a whole is checked."""


@dataclass(slots=True)
class CachedContext:
    """A render context, and everything that was derived from it for tokenizing."""

    key: bytes
    context: RenderContext
    leading_messages: list[Message]
    """Messages from other fields of the request (Anthropic's `system`); they go before its list of messages."""
    add_special_tokens: bool
    tail_renderer: TailRenderer | None
    tail_check: TailCheck
    cut_tokens: list[str]
    plain_layout: PlainLayout | None
    cost_bytes: int

    def can_render_tail(self) -> bool:
        return self.tail_renderer is not None and self.tail_check.safe_for_clean_messages


@dataclass(slots=True)
class ChatPlan:
    """How a conversation will be tokenized: which prefix is cached, and which messages are new."""

    context: CachedContext
    messages: MessageList
    prefix: CachedPrefix | None
    tail: list[Message]
    new_bytes: int
    """Size of the new messages in the body."""
    new_messages: int
    plain: Outline | None = None
    """The request's outline if all its messages are plain. Then their tokens are put together (plain_chats.py)."""
    is_warm: bool = False
    """Whether the tokens of a message are cached."""


class ChatTokenizer:
    """Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, budget_bytes: int) -> None:
        self._tokenizer = tokenizer
        self._contexts_budget_bytes = budget_bytes // _CONTEXT_BUDGET_DIVISOR
        self._contexts_bytes = 0
        self._contexts: OrderedDict[bytes, CachedContext] = OrderedDict()
        self._tail_checks: dict[str, TailCheck] = {}
        self._lock = threading.Lock()
        self._whole_renders = 0
        tokens_budget_bytes = budget_bytes - self._contexts_budget_bytes
        self.token_cache = TokenCache(tokens_budget_bytes // 2)
        self.plain_chats = PlainChats(tokenizer, tokens_budget_bytes // 2)
        self.failed_checks = 0
        """How often a real conversation showed that tail rendering gives wrong tokens for a template."""
        self.failed_layouts = 0
        """How often a real conversation showed that a layout gives wrong tokens for a template."""

    @property
    def used_bytes(self) -> int:
        return self.token_cache.used_bytes + self.plain_chats.messages.bytes + self._contexts_bytes

    # ---- Render contexts ----

    def cached_context(self, key: bytes) -> CachedContext | None:
        """Return None for a context that is not known, or whose template prints another date by now."""
        cached = self._contexts.get(key)
        if cached is None:
            return None
        try:
            self._contexts.move_to_end(key)
        except KeyError:
            pass  # another thread has just evicted it
        plain = cached.plain_layout
        if plain is not None and plain.layout.time_key and plain.is_outdated():
            self._remove_context(key)
            return None
        return cached

    def _remove_context(self, key: bytes) -> None:
        with self._lock:
            removed = self._contexts.pop(key, None)
            if removed is not None:
                self._contexts_bytes -= removed.cost_bytes

    def add_context(
        self,
        key: bytes,
        size_bytes: int,
        context: RenderContext,
        leading_messages: list[Message],
        add_special_tokens: bool,
    ) -> CachedContext:
        """Prepare a context for tokenizing, and cache it. `size_bytes`: the size of its fields in the request."""
        # A template that a request brings is used once. To check it would cost a second each time.
        check = self._tail_check(context.template) if context.uses_model_template else TailCheck(None)
        cut_tokens = self._find_cut_tokens(context)
        renderer = self._tail_renderer(context, check) if cut_tokens else None
        cost = _CONTEXT_BYTES_PER_BODY_BYTE * size_bytes + _CONTEXT_OVERHEAD_BYTES
        plain = None if leading_messages else self.plain_chats.layout(context, cut_tokens, add_special_tokens)
        added = CachedContext(
            key, context, leading_messages, add_special_tokens, renderer, check, cut_tokens, plain, cost
        )
        with self._lock:
            if key not in self._contexts and cost <= self._contexts_budget_bytes:
                self._contexts[key] = added
                self._contexts_bytes += cost
                while self._contexts_bytes > self._contexts_budget_bytes:
                    self._contexts_bytes -= self._contexts.popitem(last=False)[1].cost_bytes
        return added

    def _tail_check(self, template: ChatTemplate) -> TailCheck:
        """Takes a second for a new template."""
        check = self._tail_checks.get(template.source)
        if check is None:
            check = self._tail_checks[template.source] = TailCheck(template)
        return check

    def _tail_renderer(self, context: RenderContext, check: TailCheck) -> TailRenderer | None:
        if not check.safe_for_clean_messages:
            return None
        try:
            renderer = check.tail_renderer(context)
        except TemplateRejected:
            return None
        # The check of the template has covered requests without any of these.
        if not context.tools and not context.variables and not context.documents:
            return renderer
        return renderer if check.passes_for(context) else None

    def _find_cut_tokens(self, context: RenderContext) -> list[str]:
        """Return the added tokens that the template prints between messages and after which text may be cut."""
        try:
            sample = context.render([context.text_message(role, "x") for role in ("user", "assistant", "user")])
        except TemplateRejected:
            return []
        tokenizer = self._tokenizer
        return [token for token in tokenizer.added_tokens if token in sample and tokenizer.can_cut_after(token)]

    # ---- Tokenizing ----

    def plan(self, context: CachedContext, messages: MessageList, outline: Outline | None = None) -> ChatPlan:
        """Find out which messages are new, or else the longest cached prefix. Raises UnsupportedRequest.

        `outline`: of the request, if its messages reach the chat template as they are.
        """
        if outline is not None and context.plain_layout is not None:
            new = self.plain_chats.new_messages(context.plain_layout, outline)
            if new is not None:
                new_size = sum([size for _message, _start, _end, size in new])
                return ChatPlan(context, messages, None, [], new_size, len(new), outline, len(new) < messages.count)
        return self._plan_tail(context, messages, outline)

    def _plan_tail(self, context: CachedContext, messages: MessageList, outline: Outline | None = None) -> ChatPlan:
        if context.can_render_tail():
            plan = self._find_prefix(context, messages)
            if plan is None and outline is not None and self._add_plain_prefix(context, messages, outline):
                plan = self._find_prefix(context, messages)
            if plan is not None:
                return plan
        return ChatPlan(context, messages, None, [], messages.size_bytes(0, messages.count), messages.count)

    def _find_prefix(self, context: CachedContext, messages: MessageList) -> ChatPlan | None:
        key, tail, decoded_from = self._prefix_key(context), list[Message](), messages.count
        for count in range(messages.count, max(0, messages.count - _MAX_NEW_MESSAGES), -1):
            prefix = self.token_cache.get(key + messages.digest(count))
            if prefix is None:
                continue
            tail, decoded_from = messages.messages(count, decoded_from) + tail, count
            # The longest prefix first. A shorter one may do where the longest must not be used.
            if may_follow(prefix.ends_with_user, tail) and self._may_use(context, prefix, tail):
                new_bytes = messages.size_bytes(count, messages.count)
                return ChatPlan(context, messages, prefix, tail, new_bytes, messages.count - count, is_warm=True)
        return None

    def _add_plain_prefix(self, context: CachedContext, messages: MessageList, outline: Outline) -> bool:
        """Cache the plain messages at the start of a conversation as a prefix, if their tokens are known.

        So the first tool call of a conversation does not make the router render the messages before it.
        """
        layout, renderer = context.plain_layout, context.tail_renderer
        if layout is None or renderer is None or not context.tail_check.safe_for_all_messages:
            return False
        count = _plain_messages_to_the_last_question(outline, renderer)
        found = self.plain_chats.prefix(layout, outline, count)
        rest = None if found is None else renderer.without_generation_prompt(found[2])
        if found is None or rest is None:
            return False
        tokens, cut_token, _text = found
        key = self._prefix_key(context) + messages.digest(count)
        starts_with_system = outline.plain_roles[0] == SYSTEM_ROLE
        self.token_cache.add(
            CachedPrefix(key, None, cut_token, rest, True, starts_with_system, True, tokens, len(tokens))
        )
        return True

    def tokenize(self, plan: ChatPlan) -> Prompt:
        """Raises UnsupportedRequest, TemplateRejected, UnicodeEncodeError."""
        if plan.plain is not None and plan.context.plain_layout is not None:
            plain = self.plain_chats.tokenize(plan.context.plain_layout, plan.plain)
            if plain is not None:
                return plain
            plan = self._plan_tail(plan.context, plan.messages)
        if plan.prefix is None:
            result = self._tokenize_whole(plan)
        else:
            try:
                result = self._tokenize_tail(plan, plan.prefix)
            except TemplateRejected:
                result = self._tokenize_whole(plan)
        if plan.context.add_special_tokens:
            before = len(self._tokenizer.special_prefix) // TOKEN_BYTES
            result.tokens = self._tokenizer.special_prefix + result.tokens + self._tokenizer.special_suffix
            result.exact_tokens = before + result.exact_tokens if result.inexact_reason else result.token_count
            result.media = tuple((before + at, key) for at, key in result.media)
        if plan.context.context.template.prints_time_of_day():
            # The engine renders a moment later, perhaps with another minute in the first line.
            result.exact_tokens, result.inexact_reason = 0, "the chat template prints the time of day"
        return result

    def tokenize_without_cache(self, plan: ChatPlan) -> bytes:
        """Return the tokens that `tokenize` must give. Raises the same exceptions."""
        messages = plan.context.leading_messages + plan.messages.messages(0, plan.messages.count)
        return self._tokenizer.encode(plan.context.context.render(messages), plan.context.add_special_tokens)

    def _tokenize_whole(self, plan: ChatPlan) -> Prompt:
        cached, context = plan.context, plan.context.context
        messages = cached.leading_messages + plan.messages.messages(0, plan.messages.count)
        text = context.render(messages)
        if MEDIA_MARK in text:
            return self._tokenize_with_media(cached, messages, text)
        prefix: CachedPrefix | None = None
        renderer = cached.tail_renderer
        if renderer is not None and cached.can_render_tail() and plan.messages.count:
            mapped = list(context.map_developer_role(messages))
            if may_be_prefix(mapped, renderer):
                self._check_sometimes(context, renderer, cached.tail_check, mapped)
                prefix = self._new_prefix(plan, None, text, mapped, mapped[0]["role"] == "system")
        if prefix is None:
            return exact_prompt(self._tokenizer.encode(text))
        return self._encode_and_cache(plan, prefix, "", text)

    def _tokenize_tail(self, plan: ChatPlan, prefix: CachedPrefix) -> Prompt:
        renderer = plan.context.tail_renderer
        assert renderer is not None
        tail_text = renderer.render_tail(prefix.starts_with_system, prefix.ends_with_user, plan.tail)
        text = prefix.text_after_cut + tail_text
        if MEDIA_MARK in text:
            return self._tokenize_whole(plan)
        new: CachedPrefix | None = None
        if plan.tail and renderer.may_end_prefix(plan.tail[-1]) and self._last_user_asks(renderer, plan.tail):
            new = self._new_prefix(plan, prefix, text, plan.tail, prefix.starts_with_system)
        if new is None:
            self.token_cache.touch(prefix)
            encoded = self._tokenizer.encode(prefix.cut_token + text)
            tokens = prefix.all_tokens() + self._without_first(prefix.cut_token, encoded)
            return exact_prompt(tokens, prefix.token_bytes // TOKEN_BYTES)
        return self._encode_and_cache(plan, new, prefix.cut_token, text)

    def _new_prefix(
        self,
        plan: ChatPlan,
        parent: CachedPrefix | None,
        text: str,
        messages: Sequence[Message],
        starts_with_system: bool,
    ) -> CachedPrefix | None:
        """Return a prefix whose tokens are still empty; None where its text contains no cut token."""
        context, renderer = plan.context, plan.context.tail_renderer
        assert renderer is not None
        prefix_text = renderer.without_generation_prompt(text)
        if prefix_text is None:
            return None
        cut_token, cut_at = "", 0
        for token in context.cut_tokens:
            end = prefix_text.rfind(token) + len(token)
            if end >= len(token) and end > cut_at:
                cut_token, cut_at = token, end
        if not cut_token:
            return None
        clean = context.tail_check.safe_for_all_messages or (
            (parent is None or parent.clean) and all(renderer.is_clean(message) for message in messages)
        )
        key = self._prefix_key(context)
        if parent is not None and not parent.key.startswith(key):
            return None  # the date that the template prints has changed since
        key += plan.messages.digest(plan.messages.count)
        ends_with_user = messages[-1]["role"] == "user"
        return CachedPrefix(key, parent, cut_token, prefix_text[cut_at:], ends_with_user, starts_with_system, clean)

    def _encode_and_cache(self, plan: ChatPlan, prefix: CachedPrefix, parent_cut_token: str, text: str) -> Prompt:
        """Encode the text after the parent, up to the new prefix's cut and after it, and cache the prefix."""
        renderer = plan.context.tail_renderer
        assert renderer is not None
        # Two encodings instead of one: the part up to the cut is kept for the next turn, the rest is not.
        at = len(text) - len(renderer.generation_prompt) - len(prefix.text_after_cut)
        encoded = self._tokenizer.encode(parent_cut_token + text[:at])
        prefix.tokens = self._without_first(parent_cut_token, encoded)
        after_cut = self._tokenizer.encode_cached(prefix.cut_token + text[at:])
        parent = prefix.parent
        prefix.token_bytes = len(prefix.tokens) + (parent.token_bytes if parent else 0)
        self.token_cache.add(prefix)
        tokens = prefix.all_tokens() + self._without_first(prefix.cut_token, after_cut)
        warm_tokens = parent.token_bytes // TOKEN_BYTES if parent else 0
        return exact_prompt(tokens, warm_tokens)

    def _without_first(self, cut_token: str, tokens: bytes) -> bytes:
        """Remove the cut token, which was put before the text to encode."""
        if not cut_token:
            return tokens
        if not tokens.startswith(self._tokenizer.token_id(cut_token)):
            raise UnsupportedRequest("the tokenizer did not find the cut token")
        return tokens[TOKEN_BYTES:]

    def _tokenize_with_media(self, cached: CachedContext, messages: Sequence[Message], text: str) -> Prompt:
        """Give no tokens to pictures; the tokens are sure up to the last cut before the first picture."""
        # The tokens of the text around pictures are encoded all the same: lengths and routing keys need them.
        first, *others = text.split(MEDIA_MARK)
        unchanged = first
        if cached.context.content_format == "openai":
            # the template sees which messages have pictures, and may print another text from the start
            unchanged = _common_prefix(first, cached.context.render(as_media_parts(messages)))
        cuts = (unchanged.rfind(token) + len(token) for token in cached.cut_tokens if token in unchanged)
        cut_at = max(cuts, default=0)
        tokens = self._tokenizer.encode(first[:cut_at])
        exact_tokens = len(tokens) // TOKEN_BYTES
        tokens += self._tokenizer.encode(first[cut_at:])
        media: list[tuple[int, bytes]] = []
        digits = MEDIA_MARK_LENGTH - len(MEDIA_MARK)
        for piece in others:
            media.append((len(tokens) // TOKEN_BYTES, piece[:digits].encode("ascii", "replace")))
            tokens += self._tokenizer.encode(piece[digits:])
        reason = "only the engine knows how many tokens a picture takes"
        return Prompt(tokens, exact_tokens, media=tuple(media), inexact_reason=reason)

    # ---- Checks ----

    def disable_tail_rendering(self, check: TailCheck) -> None:
        """Tokenize conversations with this template as a whole from now on."""
        self.failed_checks += 1
        check.disable()
        self.token_cache.clear()

    def disable(self, plan: ChatPlan) -> None:
        """Do not use the cache in this way any more for conversations with this template: it gave wrong tokens."""
        if plan.plain is not None and plan.context.plain_layout is not None:
            self.failed_layouts += 1
            self.plain_chats.disable(plan.context.plain_layout.check)
        else:
            self.disable_tail_rendering(plan.context.tail_check)

    def _check_sometimes(
        self, context: RenderContext, renderer: TailRenderer, check: TailCheck, messages: Sequence[Message]
    ) -> None:
        """Test tail rendering with some of the conversations that are rendered as a whole anyway."""
        self._whole_renders += 1
        if self._whole_renders > _CHECK_FIRST and self._whole_renders % _CHECK_EVERY:
            return
        if not check.safe_for_all_messages and not all(renderer.is_clean(message) for message in messages):
            return
        if differs_at_last_cut(context, renderer, messages):
            self.disable_tail_rendering(check)

    @staticmethod
    def _may_use(context: CachedContext, prefix: CachedPrefix, tail: Sequence[Message]) -> bool:
        if context.tail_check.safe_for_all_messages:
            return True
        renderer = context.tail_renderer
        return prefix.clean and renderer is not None and all(renderer.is_clean(message) for message in tail)

    @staticmethod
    def _last_user_asks(renderer: TailRenderer, tail: Sequence[Message]) -> bool:
        last = next((message for message in reversed(tail) if message["role"] == "user"), None)
        return last is None or renderer.is_question(last)

    @staticmethod
    def _prefix_key(context: CachedContext) -> bytes:
        return context.key + context.context.template.time_key().encode()


def _plain_messages_to_the_last_question(outline: Outline, renderer: TailRenderer) -> int:
    """Return how many plain messages a conversation starts with, up to the last question among them."""
    roles = outline.plain_roles
    count = roles.find(0)
    while count > 0:
        text = outline.plain_text(count - 1) if roles[count - 1] == USER_ROLE else None
        if text is not None and renderer.is_question({"role": "user", "content": text}):
            return count
        count -= 1
    return 0


def _common_prefix(one: str, other: str) -> str:
    same, longest = 0, min(len(one), len(other))
    while same < longest:
        middle = (same + longest + 1) // 2
        if one[:middle] == other[:middle]:
            same = middle
        else:
            longest = middle - 1
    return one[:same]
