"""From a conversation to its tokens: at once where its beginning is known, else by rendering and encoding all of it."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from warmroute.prompt.chat_setting import ChatSetting
from warmroute.prompt.chat_template import ChatTemplate, Message, Refused
from warmroute.prompt.conversation import MEDIA_MARK, MEDIA_MARK_LENGTH, NotFollowed, as_media_parts
from warmroute.prompt.locality import Locality, differs_at_last_cut
from warmroute.prompt.message_spans import Units
from warmroute.prompt.stems import Stem, Stems
from warmroute.prompt.tail_rendering import Window, fits_behind, may_have_stems
from warmroute.prompt.tokenizer import TOKEN_BYTES, Tokenizer

_SETTINGS_SHARE: Final = 8
"""One in so many bytes of the budget is for settings."""
_SETTING_COST: Final = 12
"""Bytes that a setting holds for each byte of its request: parsed tools, their JSON, the heads' texts. And a
constant.
"""
_SETTING_BYTES: Final = 16_384
_MOST_NEW_UNITS: Final = 1024
"""A conversation that grew by more than that is new."""
_CHECK_FIRST: Final = 8
_CHECK_EVERY: Final = 32


@dataclass(slots=True)
class Rendered:
    tokens: bytes
    sure_tokens: int
    warm_tokens: int = 0
    media: tuple[tuple[int, bytes], ...] = ()
    doubt: str = ""


@dataclass(slots=True)
class Prepared:
    """A setting with what goes before the conversation, ready for use."""

    key: bytes
    setting: ChatSetting
    lead: list[Message]
    add_special_tokens: bool
    window: Window | None
    locality: Locality
    cuts: list[str]
    cost_bytes: int

    def has_window(self) -> bool:
        return self.window is not None and self.locality.with_clean_messages


@dataclass(slots=True)
class Plan:
    """What is known before the work is done."""

    prepared: Prepared
    units: Units
    stem: Stem | None
    tail: list[Message]
    new_bytes: int
    """Of the body: those that are not known yet."""


class ChatReader:
    """Tokens of conversations. Safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer, budget_bytes: int) -> None:
        self._tokenizer = tokenizer
        self._settings_budget_bytes = budget_bytes // _SETTINGS_SHARE
        self._settings_bytes = 0
        self._settings: OrderedDict[bytes, Prepared] = OrderedDict()
        self._localities: dict[str, Locality] = {}
        self._lock = threading.Lock()
        self._cold = 0
        self.stems = Stems(budget_bytes - self._settings_budget_bytes)
        self.contradictions = 0
        """How often a real conversation has shown that a template has no window after all."""

    @property
    def used_bytes(self) -> int:
        return self.stems.used_bytes + self._settings_bytes

    # ---- Settings ----

    def known(self, key: bytes) -> Prepared | None:
        with self._lock:
            prepared = self._settings.get(key)
            if prepared is not None:
                self._settings.move_to_end(key)
        return prepared

    def prepare(
        self, key: bytes, size_bytes: int, setting: ChatSetting, lead: list[Message], add_special_tokens: bool
    ) -> Prepared:
        locality = self.locality(setting.template) if setting.is_the_models_own else Locality(None)
        cuts = self._cuts(setting)
        window = self._window(setting, locality) if cuts else None
        cost = _SETTING_COST * size_bytes + _SETTING_BYTES
        made = Prepared(key, setting, lead, add_special_tokens, window, locality, cuts, cost)
        with self._lock:
            if key not in self._settings and cost <= self._settings_budget_bytes:
                self._settings[key] = made
                self._settings_bytes += cost
                while self._settings_bytes > self._settings_budget_bytes:
                    self._settings_bytes -= self._settings.popitem(last=False)[1].cost_bytes
        return made

    def locality(self, template: ChatTemplate) -> Locality:
        """Takes a second, the first time."""
        found = self._localities.get(template.source)
        if found is None:
            found = self._localities[template.source] = Locality(template)
        return found

    def _window(self, setting: ChatSetting, locality: Locality) -> Window | None:
        if not locality.with_clean_messages:
            return None
        try:
            window = locality.window(setting)
        except Refused:
            return None
        if not setting.tools and not setting.variables and not setting.documents:
            return window
        return window if locality.holds_for(setting) else None

    def _cuts(self, setting: ChatSetting) -> list[str]:
        """Added tokens that the template puts between messages, and behind which text may be cut."""
        try:
            sample = setting.render([_plain(setting, role) for role in ("user", "assistant", "user")])
        except Refused:
            return []
        return [token for token in self._tokenizer.added_tokens if token in sample and self._tokenizer.cuts(token)]

    # ---- Reading ----

    def plan(self, prepared: Prepared, units: Units) -> Plan:
        """Raises NotFollowed."""
        if prepared.has_window():
            key, tail, read_from = self._stem_key(prepared), list[Message](), units.count
            for count in range(units.count, max(0, units.count - _MOST_NEW_UNITS), -1):
                stem = self.stems.get(key + units.digest(count))
                if stem is None:
                    continue
                tail, read_from = units.messages(count, read_from) + tail, count
                if fits_behind(stem.settled, tail) and self._may_use(prepared, stem, tail):
                    return Plan(prepared, units, stem, tail, units.size_bytes(count, units.count))
        return Plan(prepared, units, None, [], units.size_bytes(0, units.count))

    def read(self, plan: Plan) -> Rendered:
        """Raises NotFollowed, Refused, UnicodeEncodeError."""
        if plan.stem is None:
            made = self._read_all(plan)
        else:
            try:
                made = self._read_tail(plan, plan.stem)
            except Refused:
                made = self._read_all(plan)
        if plan.prepared.add_special_tokens:
            before = len(self._tokenizer.before) // TOKEN_BYTES
            made.tokens = self._tokenizer.before + made.tokens + self._tokenizer.behind
            made.sure_tokens = before + made.sure_tokens if made.doubt else len(made.tokens) // TOKEN_BYTES
            made.media = tuple((before + at, key) for at, key in made.media)
        if plan.prepared.setting.template.prints_the_hour():
            made.sure_tokens, made.doubt = 0, "the template prints the time of day"
        return made

    def read_plainly(self, plan: Plan) -> bytes:
        """The tokens without any cache: the measure of `read`. Raises NotFollowed, Refused, UnicodeEncodeError."""
        text = plan.prepared.setting.render(plan.prepared.lead + plan.units.messages(0, plan.units.count))
        return self._tokenizer.encode(text, plan.prepared.add_special_tokens)

    def _read_all(self, plan: Plan) -> Rendered:
        prepared, setting = plan.prepared, plan.prepared.setting
        messages = prepared.lead + plan.units.messages(0, plan.units.count)
        text = setting.render(messages)
        if MEDIA_MARK in text:
            return self._with_media(prepared, messages, text)
        stem: Stem | None = None
        window = prepared.window
        if window is not None and prepared.has_window() and plan.units.count:
            for_template = list(setting.for_template(messages))
            if may_have_stems(for_template, window):
                self._check(setting, window, prepared.locality, for_template)
                stem = self._new_stem(plan, None, text, for_template, for_template[0]["role"] == "system")
        if stem is None:
            tokens = self._tokenizer.encode(text)
            return Rendered(tokens, len(tokens) // TOKEN_BYTES)
        return self._grow(plan, stem, "", text)

    def _read_tail(self, plan: Plan, stem: Stem) -> Rendered:
        window = plan.prepared.window
        assert window is not None
        text = stem.rest + window.text_behind(stem.starts_with_system, stem.settled, plan.tail)
        if MEDIA_MARK in text:
            return self._read_all(plan)
        new: Stem | None = None
        if plan.tail and window.may_end_a_stem(plan.tail[-1]) and self._last_user_asks(window, plan.tail):
            new = self._new_stem(plan, stem, text, plan.tail, stem.starts_with_system)
        if new is None:
            self.stems.use(stem)
            tokens = stem.all_tokens() + self._behind(stem.cut, self._tokenizer.encode(stem.cut + text))
            return Rendered(tokens, len(tokens) // TOKEN_BYTES, stem.token_bytes // TOKEN_BYTES)
        return self._grow(plan, new, stem.cut, text)

    def _new_stem(
        self, plan: Plan, parent: Stem | None, text: str, messages: Sequence[Message], starts_with_system: bool
    ) -> Stem | None:
        """Without its tokens yet; `rest` is all the text behind its cut. None where it would have no clean cut."""
        prepared, window = plan.prepared, plan.prepared.window
        assert window is not None
        own = window.without_generation_prompt(text)
        if own is None:
            return None
        cut, at = "", 0
        for token in prepared.cuts:
            end = own.rfind(token) + len(token)
            if end >= len(token) and end > at:
                cut, at = token, end
        if not cut:
            return None
        clean = prepared.locality.with_any_message or (
            (parent is None or parent.clean) and all(window.is_clean(message) for message in messages)
        )
        prefix = self._stem_key(prepared)
        if parent is not None and not parent.key.startswith(prefix):
            return None  # it has become another day since
        key = prefix + plan.units.digest(plan.units.count)
        settled = messages[-1]["role"] == "user"
        return Stem(key, parent, b"", cut, own[at:], settled, starts_with_system, clean)

    def _grow(self, plan: Plan, stem: Stem, cut_before: str, text: str) -> Rendered:
        """Encodes the text behind the parent: up to the new stem's cut, and behind it."""
        window = plan.prepared.window
        assert window is not None
        at = len(text) - len(window.generation_prompt) - len(stem.rest)
        stem.tokens = self._behind(cut_before, self._tokenizer.encode(cut_before + text[:at]))
        behind = self._tokenizer.encode_again(stem.cut + text[at:])
        parent = stem.parent
        stem.token_bytes = len(stem.tokens) + (parent.token_bytes if parent else 0)
        self.stems.add(stem)
        tokens = stem.all_tokens() + self._behind(stem.cut, behind)
        warm = parent.token_bytes // TOKEN_BYTES if parent else 0
        return Rendered(tokens, len(tokens) // TOKEN_BYTES, warm)

    def _behind(self, cut: str, tokens: bytes) -> bytes:
        if not cut:
            return tokens
        if not tokens.startswith(self._tokenizer.token_id(cut)):
            raise NotFollowed("an added token that is not found where it stands")
        return tokens[TOKEN_BYTES:]

    def _with_media(self, prepared: Prepared, messages: Sequence[Message], text: str) -> Rendered:
        """Tokens with nothing where pictures are; sure up to the last clean cut before the first of them."""
        first, *others = text.split(MEDIA_MARK)
        before = first
        if prepared.setting.format == "openai":
            # the template sees which messages have pictures, and may say something else from the start
            before = _shared_beginning(first, prepared.setting.render(as_media_parts(messages)))
        at = max((before.rfind(token) + len(token) for token in prepared.cuts if token in before), default=0)
        tokens = self._tokenizer.encode(first[:at])
        sure = len(tokens) // TOKEN_BYTES
        tokens += self._tokenizer.encode(first[at:])
        media: list[tuple[int, bytes]] = []
        digits = MEDIA_MARK_LENGTH - len(MEDIA_MARK)
        for piece in others:
            media.append((len(tokens) // TOKEN_BYTES, piece[:digits].encode("ascii", "replace")))
            tokens += self._tokenizer.encode(piece[digits:])
        return Rendered(tokens, sure, media=tuple(media), doubt="only the engine knows how many tokens a picture takes")

    # ---- Checks ----

    def contradict(self, locality: Locality) -> None:
        self.contradictions += 1
        locality.deny()
        self.stems.clear()

    def _check(self, setting: ChatSetting, window: Window, locality: Locality, messages: Sequence[Message]) -> None:
        """Some conversations that are rendered in whole anyway are asked whether the window would have been right."""
        self._cold += 1
        if self._cold > _CHECK_FIRST and self._cold % _CHECK_EVERY:
            return
        if not locality.with_any_message and not all(window.is_clean(message) for message in messages):
            return
        if differs_at_last_cut(setting, window, messages):
            self.contradict(locality)

    @staticmethod
    def _may_use(prepared: Prepared, stem: Stem, tail: Sequence[Message]) -> bool:
        if prepared.locality.with_any_message:
            return True
        window = prepared.window
        return stem.clean and window is not None and all(window.is_clean(message) for message in tail)

    @staticmethod
    def _last_user_asks(window: Window, tail: Sequence[Message]) -> bool:
        last = next((message for message in reversed(tail) if message["role"] == "user"), None)
        return last is None or window.is_question(last)

    @staticmethod
    def _stem_key(prepared: Prepared) -> bytes:
        return prepared.key + prepared.setting.template.time_key().encode()


def _shared_beginning(one: str, other: str) -> str:
    same, longest = 0, min(len(one), len(other))
    while same < longest:
        middle = (same + longest + 1) // 2
        if one[:middle] == other[:middle]:
            same = middle
        else:
            longest = middle - 1
    return one[:same]


def _plain(setting: ChatSetting, role: str) -> Message:
    return {"role": role, "content": [{"type": "text", "text": "x"}] if setting.format == "openai" else "x"}
