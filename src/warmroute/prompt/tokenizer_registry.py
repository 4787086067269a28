"""The library: which reader reads the prompts of which model, and where its tokenizer comes from.

A tokenizer is configured (`[[models]] tokenizer`), or discovered: a node's /v1/models names, as `root`, a path that
exists on this machine, too. Whoever configures a node trusts it that far. What lies at such a path is read as tokenizer
files, and a chat template among them runs in its sandbox; nothing else is opened, and nothing is executed.

Files are read and readers are made in one thread, one after the other; meanwhile the reader of before goes on, or the
stand-in, whose tokens are text. On the loop there is only bookkeeping, of recipes:

    wanted     by the configuration, and by what the nodes said last
    made_of    what the reader in use was made of
    loading    what the thread was told to make; when it is done and still wanted, it comes into use
    failed     what could not be made: rested, and tried again after that if it is still wanted
"""

from __future__ import annotations

import asyncio
import logging
import os
import stat
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, TypeVar
from weakref import WeakKeyDictionary, WeakValueDictionary

import msgspec

from warmroute.config import ConfigError, ModelConfig, Prompts
from warmroute.prompt.chat_setting import EngineOptions
from warmroute.prompt.chat_template import ChatTemplate, Refused
from warmroute.prompt.content_format import ContentFormat
from warmroute.prompt.reading import PromptTokenizer
from warmroute.prompt.tokenizer import Tokenizer, load_tokenizer

log = logging.getLogger("warmroute.prompt")
Made = TypeVar("Made")

REST_S: Final = 300.0
"""How long what could not be loaded is left alone."""
_FILE_BYTES: Final = 512 << 20
"""A tokenizer.json that is larger is none."""
_REASON_LENGTH: Final = 300


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a reader is made of."""

    path: str
    chat_template: str
    """A file; empty for the model's own."""
    content_format: ContentFormat | None
    template_kwargs: bytes
    """As JSON, so that 1 and true are not the same."""
    trust_request_chat_template: bool
    exclude_tools_when_tool_choice_none: bool
    max_model_len: int
    cache_bytes: int


@dataclass(frozen=True, slots=True)
class Root:
    """Where a model lies, in a node's words."""

    path: str
    """A name on a hub, where it is not absolute."""
    max_model_len: int
    """0: unknown."""


@dataclass(slots=True)
class Said:
    """What a node said last."""

    roots: dict[str, Root] = field(default_factory=dict)
    adapters: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class _Entry:
    """One model's books."""

    reader: PromptTokenizer | None = None
    made_of: Recipe | None = None
    loading: Recipe | None = None
    problem: str = ""
    """Why what is wanted is not in use."""
    compared: set[str] = field(default_factory=set)
    """Other paths that nodes name for this model, and whose tokenizers were compared with the one in use."""


class TokenizerRegistry:
    """Belongs to one loop. `reader` is for the request path, the rest is not. To be closed."""

    def __init__(
        self, prompts: Prompts, models: Sequence[ModelConfig], now: Callable[[], float] = time.monotonic
    ) -> None:
        # for its whole life
        self._now = now
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="warmroute-library")
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        self._stand_in = PromptTokenizer(None)
        self.mismatches = 0
        """Paths at which another tokenizer lies than the one in use for the same model."""
        self.contradictions = 0
        """How often a real conversation has shown that a template has no window after all, over all readers."""
        self._counted: WeakKeyDictionary[PromptTokenizer, int] = WeakKeyDictionary()

        # for the thread alone
        self._tokenizers: WeakValueDictionary[tuple[Any, ...], Tokenizer] = WeakValueDictionary()
        self._made: WeakValueDictionary[tuple[Any, ...], PromptTokenizer] = WeakValueDictionary()

        # until it is configured anew
        self._prompts = prompts
        self._models = {model.name: model for model in models}

        # as nodes and files change
        self._said: dict[str, Said] = {}
        self._entries: dict[str, _Entry] = {}
        self._failed: dict[Recipe, tuple[float, str]] = {}
        """Until when they rest, and why."""
        self.adapters: dict[str, str] = {}
        """Adapters (LoRA) and their base models."""
        self._readers: dict[str, PromptTokenizer] = {}
        """Those of adapters, too."""

    def reader(self, model: str) -> PromptTokenizer:
        """Where no tokenizer is known, a stand-in without one."""
        return self._readers.get(model, self._stand_in)

    # ---- What is to be known ----

    async def load_configured(self) -> None:
        """Loads what the configuration names: before anybody is served. Raises ConfigError."""
        for model in self._models.values():
            try:
                if model.tokenizer:
                    recipe = self._recipe(model, model.tokenizer, model.max_model_len)
                    self._take(model.name, recipe, await self._in_thread(self._make, recipe))
                elif model.chat_template:
                    await self._in_thread(_template_in, model.chat_template)
            except Exception as error:  # whatever a file may hold
                raise ConfigError(f"models: the prompts of {model.name!r} can't be read: {_reason(error)}") from None

    def saw_models(self, cards: Sequence[Mapping[str, object]], where: str) -> None:
        """Takes what a node's /v1/models says. `where` is the node's name."""
        before, said = self._said.get(where), read_cards(cards, self._models)
        if said == before:
            entries = ((model, self._entries.get(model)) for model in said.roots)
            self._settle([model for model, entry in entries if entry is not None and entry.problem])
            return
        self._said[where] = said
        self._learn_adapters()
        self._settle([*said.roots, *(before.roots if before is not None else ())])

    def forget_node(self, where: str) -> None:
        """A node has left: what it alone has named goes, too."""
        before = self._said.pop(where, None)
        if before is not None:
            self._learn_adapters()
            self._settle(before.roots)

    def _learn_adapters(self) -> None:
        self.adapters = {}
        for said in self._said.values():
            for adapter, base in said.adapters.items():
                self.adapters.setdefault(adapter, base)
        self._shelve()

    def reconfigure(self, prompts: Prompts, models: Sequence[ModelConfig]) -> None:
        """Takes a changed configuration. What is the same keeps its reader and all that this remembers; what is not is
        loaded while the old goes on. Where that fails, it is said, and the old stays.
        """
        models_before, self._models = self._models, {model.name: model for model in models}
        if prompts != self._prompts or self._models != models_before:
            self._failed.clear()
        self._prompts = prompts
        self._settle([*self._models, *self._entries, *(model for said in self._said.values() for model in said.roots)])

    def _recipe(self, model: ModelConfig, path: str, max_model_len: int) -> Recipe:
        format = model.chat_template_content_format
        return Recipe(
            path,
            model.chat_template,
            None if format == "auto" else format,
            msgspec.json.encode(model.default_chat_template_kwargs, order="deterministic"),
            model.trust_request_chat_template,
            model.exclude_tools_when_tool_choice_none,
            max_model_len,
            self._prompts.cache_bytes,
        )

    def _wanted(self, name: str) -> Recipe | None:
        model = self._models.get(name) or ModelConfig(name=name)
        if model.tokenizer:
            return self._recipe(model, model.tokenizer, model.max_model_len)
        if not self._prompts.discover:
            return None
        recipes = [self._recipe(model, path, model.max_model_len or most) for path, most in self._local(name).items()]
        entry = self._entries.get(name)
        in_use = entry.made_of.path if entry is not None and entry.made_of is not None else ""
        # first the path that is in use, as long as a node names it; last those that failed
        recipes.sort(key=lambda recipe: (recipe.path != in_use, self._rests(recipe)))
        return recipes[0] if recipes else None

    def _local(self, model: str) -> dict[str, int]:
        """Local paths that nodes name for a model, in the order in which the nodes came; with the least length that
        any of them says, 0 where none does.
        """
        lengths: dict[str, int] = {}
        for said in self._said.values():
            root = said.roots.get(model)
            if root is not None and os.path.isabs(root.path):
                known = lengths.get(root.path, 0)
                lengths[root.path] = min(known, root.max_model_len) or known or root.max_model_len
        return lengths

    def _nodes_that_name(self, model: str, path: str) -> str:
        named = [node for node, said in self._said.items() if model in said.roots and said.roots[model].path == path]
        return ", ".join(named[:3]) + (f" and {len(named) - 3} more" if len(named) > 3 else "")

    def _is_configured(self, model: str) -> bool:
        return model in self._models and bool(self._models[model].tokenizer)

    def _rests(self, recipe: Recipe) -> bool:
        return recipe in self._failed and self._now() < self._failed[recipe][0]

    # ---- Getting there ----

    def _settle(self, models: Iterable[str]) -> None:
        """Begins to load what is wanted and neither there nor on its way."""
        for model in dict.fromkeys(models) if not self._closed else ():
            wanted = self._wanted(model)
            if wanted is None:
                if self._entries.pop(model, None) is not None:
                    self._shelve()
                continue
            entry = self._entries.setdefault(model, _Entry())
            if wanted == entry.made_of:
                entry.loading, entry.problem = None, ""
                self._compare_others(model, entry)
            elif self._rests(wanted):
                entry.loading, entry.problem = None, self._failed[wanted][1]
            elif wanted != entry.loading:
                entry.loading = wanted
                self._start(self._load(model, wanted))

    async def _load(self, model: str, recipe: Recipe) -> None:
        try:
            reader = await self._in_thread(self._make, recipe)
        except Exception as error:  # whatever a file may hold
            self._say_failed(model, recipe, _reason(error))
            self._settle([model])  # another node may name another path
            return
        entry = self._entries.get(model)
        if entry is not None and entry.loading == recipe:
            self._take(model, recipe, reader)
            self._compare_others(model, self._entries[model])

    def _take(self, model: str, recipe: Recipe, reader: PromptTokenizer) -> None:
        self._failed.pop(recipe, None)
        self._entries[model] = _Entry(reader, recipe)
        self._shelve()
        tokenizer = reader.tokenizer
        assert tokenizer is not None
        doubt = tokenizer.doubt or tokenizer.chat_doubt
        log.info(
            "model %r: prompts are read with the tokenizer at %r%s%s",
            model,
            recipe.path,
            f"; not exactly: {doubt}" if doubt else "",
            f"; slowly: {tokenizer.slow_because}" if tokenizer.slow_because else "",
        )

    def _say_failed(self, model: str, recipe: Recipe, reason: str) -> None:
        is_new = recipe not in self._failed
        self._failed[recipe] = self._now() + REST_S, reason
        entry = self._entries.get(model)
        if entry is None or entry.loading != recipe:
            return  # nobody wants it any more
        entry.loading, entry.problem = None, reason
        if not is_new:
            return
        stays = "without exact tokens" if entry.reader is None else "with the tokenizer of before"
        if self._is_configured(model):
            log.error("model %r: its prompts are read %s: %s", model, stays, reason)
        else:
            log.warning(
                "model %r: its prompts are read %s, since the tokenizer at %r, which node %s names, can't be read here"
                " (%s); name one that this machine has: [[models]] tokenizer",
                model,
                stays,
                recipe.path,
                self._nodes_that_name(model, recipe.path),
                reason,
            )

    def _compare_others(self, model: str, entry: _Entry) -> None:
        """Nodes that name other paths than the one in use had better have the same tokenizer there."""
        if entry.made_of is None or self._is_configured(model):
            return
        for path in self._local(model):
            if path != entry.made_of.path and path not in entry.compared:
                entry.compared.add(path)
                self._start(self._compare(model, entry, path))

    async def _compare(self, model: str, entry: _Entry, path: str) -> None:
        try:
            tokenizer = await self._in_thread(self._tokenizer_at, path)
        except Exception:  # not on this machine: nothing to be said of it
            return
        if self._entries.get(model) is not entry or entry.made_of is None or entry.reader is None:
            return
        used = entry.reader.tokenizer
        if used is not None and tokenizer is not used:
            self.mismatches += 1
            log.warning(
                "model %r: node %s has another %s (%r) than the one in use (%r): tokens for it are wrong, and it shares"
                " no cache; give the two different names, or the same files",
                model,
                self._nodes_that_name(model, path),
                "chat template" if tokenizer.fingerprint == used.fingerprint else "tokenizer",
                path,
                entry.made_of.path,
            )

    def _shelve(self) -> None:
        readers = {model: entry.reader for model, entry in self._entries.items() if entry.reader is not None}
        adapted = {adapter: readers[base] for adapter, base in self.adapters.items() if base in readers}
        self._readers = {**adapted, **readers}

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _in_thread(self, work: Callable[..., Made], *given: Any) -> Made:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *given)

    # ---- In the thread ----

    def _make(self, recipe: Recipe) -> PromptTokenizer:
        """One reader for all models that it fits. Raises OSError, ValueError."""
        tokenizer = self._tokenizer_at(recipe.path)
        template = _template_in(recipe.chat_template) if recipe.chat_template else ""
        # the reader holds its tokenizer, so while it is found here, this id is of no other
        key = (id(tokenizer), replace(recipe, path="", chat_template=template))
        reader = self._made.get(key)
        if reader is None:
            options = EngineOptions(
                template,
                recipe.content_format,
                msgspec.json.decode(recipe.template_kwargs),
                recipe.trust_request_chat_template,
                recipe.exclude_tools_when_tool_choice_none,
                recipe.max_model_len or None,
            )
            reader = self._made[key] = PromptTokenizer(tokenizer, options, recipe.cache_bytes)
        return reader

    def _tokenizer_at(self, path: str) -> Tokenizer:
        """The same object for the same files, and for equal ones elsewhere. Raises OSError, ValueError."""
        path = os.path.abspath(os.path.expanduser(path))
        file = os.path.join(path, "tokenizer.json") if os.path.isdir(path) else path
        if not file.endswith(".json"):
            os.stat(file)
            raise ValueError(f"{file}: is no tokenizer.json")
        _refuse_what_is_no_file(file)
        place = (file, *_stamps(os.path.dirname(file)))
        tokenizer = self._tokenizers.get(place)
        if tokenizer is None:
            made = load_tokenizer(path)
            content = (
                made.fingerprint,
                *(tuple(sorted(table.items())) for table in (made.templates, made.special_tokens)),
                made.doubt,
                made.chat_doubt,
            )
            tokenizer = self._tokenizers[place] = self._tokenizers.setdefault(content, made)
        return tokenizer

    # ---- Looking after it ----

    async def audit(self) -> None:
        """Has each reader check itself, in the thread. To be called every second or so."""
        readers = {entry.reader for entry in self._entries.values() if entry.reader is not None}
        if self._closed or not readers:
            return
        await self._in_thread(_audit, readers)
        for reader in readers:
            before = self._counted.get(reader, 0)
            now = reader.chats.contradictions if reader.chats is not None else 0
            self._counted[reader] = now
            self.contradictions += now - before
            if now and not before:
                log.warning(
                    "model %s: a conversation has shown that its chat template looks further back than was found out;"
                    " its conversations are read in whole from now on, which is slower",
                    ", ".join(repr(model) for model, found in self._readers.items() if found is reader),
                )

    def status(self) -> list[dict[str, object]]:
        """Each model and adapter that is known of: for people, and for the admin API."""
        seen = (model for said in self._said.values() for model in said.roots)
        return [self._status(model) for model in sorted({*self._models, *self._entries, *self.adapters, *seen})]

    def _status(self, model: str) -> dict[str, object]:
        entry = self._entries.get(model)
        base = self.adapters.get(model, "") if entry is None else ""
        entry = self._entries.get(base, _Entry()) if entry is None else entry
        reader = self.reader(model)
        tokenizer, chats = reader.tokenizer, reader.chats
        doubt = "the tokenizer is not known"
        if tokenizer is not None:
            doubt = tokenizer.doubt or (tokenizer.chat_doubt and f"chats: {tokenizer.chat_doubt}")
        return {
            "model": model,
            "adapter_of": base,
            "tokenizer": entry.made_of.path if entry.made_of is not None else "",
            "fingerprint": tokenizer.fingerprint if tokenizer is not None else "",
            "exact": not doubt,
            "doubt": doubt,
            "slow_because": tokenizer.slow_because if tokenizer is not None else "",
            "loading": entry.loading.path if entry.loading is not None else "",
            "problem": entry.problem or (self._why_none(base or model) if tokenizer is None else ""),
            "conversations": len(chats.stems) if chats is not None else 0,
            "cache_bytes": chats.used_bytes if chats is not None else 0,
            "contradictions": chats.contradictions if chats is not None else 0,
        }

    def _why_none(self, model: str) -> str:
        if model in self._entries:
            return ""
        if not self._prompts.discover:
            return "none is configured, and prompts.discover is off"
        roots = {said.roots[model].path: None for said in self._said.values() if model in said.roots}
        return f"none is configured, and its nodes name no path: {', '.join(map(repr, roots)) or 'nothing'}"

    def close(self) -> None:
        """What the thread is at, it finishes; nobody waits for it."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        self._thread.shutdown(wait=False, cancel_futures=True)


def read_cards(cards: Sequence[Mapping[str, object]], configured: Iterable[str] = ()) -> Said:
    """What a list of models says. Nonsense is passed over."""
    said = Said()
    parents: dict[str, str] = {}
    for card in cards:
        name, root, parent, most = (card.get(key) for key in ("id", "root", "parent", "max_model_len"))
        if not isinstance(name, str):
            continue
        if isinstance(parent, str) and parent and parent != name:
            parents[name] = parent
        else:
            length = most if type(most) is int and most > 0 else 0
            said.roots[name] = Root(root if isinstance(root, str) else "", length)
    for adapter, parent in parents.items():
        # an adapter's own word for its base may be a name that nobody serves
        is_known = parent in said.roots or parent in configured
        said.adapters[adapter] = parent if is_known else next(iter(said.roots), parent)
    return said


def _template_in(path: str) -> str:
    """Raises OSError, ValueError."""
    path = os.path.expanduser(path)
    _refuse_what_is_no_file(path)
    text = Path(path).read_text(encoding="utf-8")
    if not text.strip():
        raise ValueError(f"{path}: is empty")
    try:
        ChatTemplate(text, {})
    except Refused as problem:
        raise ValueError(f"{path}: is no chat template: {problem}") from None
    return text


def _refuse_what_is_no_file(path: str) -> None:
    """Pipes and devices never end. Raises OSError, ValueError."""
    found = os.stat(path)
    if not stat.S_ISREG(found.st_mode):
        raise ValueError(f"{path}: is no file")
    if found.st_size > _FILE_BYTES:
        raise ValueError(f"{path}: is too large, {found.st_size} bytes")


def _stamps(folder: str) -> list[tuple[str, int, int]]:
    """Changes when the files that belong to a tokenizer do."""
    with os.scandir(folder) as found:
        files = [entry for entry in found if entry.name.endswith((".json", ".jinja")) and entry.is_file()]
        return sorted((entry.name, entry.stat().st_mtime_ns, entry.stat().st_size) for entry in files)


def _audit(readers: Iterable[PromptTokenizer]) -> None:
    for reader in readers:
        try:
            reader.audit()
        except Exception as error:  # its words may be a user's
            log.warning("checking a prompt once more failed with %s", type(error).__name__)


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return f"{error or type(error).__name__}"[:_REASON_LENGTH]
