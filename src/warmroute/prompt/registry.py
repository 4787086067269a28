"""Which tokenizer and chat template belong to which model: loaded, searched, and their status."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal, TypeVar
from weakref import WeakSet, WeakValueDictionary

import msgspec

from warmroute.config import ConfigError, ModelConfig, Prompts
from warmroute.event_log import EventLog, where_it_failed
from warmroute.prompt.chat_template import ChatTemplate, ContentFormat, TemplateRejected
from warmroute.prompt.hub import HubSource, HubTokenizers, hub_id_of
from warmroute.prompt.prompt_tokenizer import PromptTokenizer
from warmroute.prompt.template_messages import EngineOptions
from warmroute.prompt.tokenizer import Tokenizer, load_tokenizer

# Load tokenizers and chat templates from local files. Loading takes seconds, so it runs in a thread.
#
# The loader opens only tokenizer files and chat templates, runs templates only in a sandbox, and executes nothing else.

_MAX_FILE_BYTES: Final = 512 << 20
"""A larger file is not a tokenizer.json. A node names the path, so it may be any file of this machine."""
_MAX_REASON_LENGTH: Final = 300


@dataclass(frozen=True, slots=True)
class TokenizerSpec:
    """What a PromptTokenizer is made from."""

    path: str
    chat_template: str
    """Path of a chat template; empty for the model's own."""
    content_format: ContentFormat | None
    template_kwargs: bytes
    """The template's variables as JSON, because 1 and True are equal in Python."""
    trust_request_chat_template: bool
    exclude_tools_when_tool_choice_none: bool
    max_model_len: int
    cache_bytes: int


class TokenizerLoader:
    """Loads the same files only once. Not thread-safe: one thread uses it."""

    def __init__(self) -> None:
        self._tokenizers: WeakValueDictionary[tuple[Any, ...], Tokenizer] = WeakValueDictionary()
        self._prompt_tokenizers: WeakValueDictionary[tuple[Any, ...], PromptTokenizer] = WeakValueDictionary()

    def load(self, spec: TokenizerSpec) -> PromptTokenizer:
        """Return the same object for equal files and options. Raises OSError, ValueError."""
        tokenizer = self.load_tokenizer(spec.path)
        template = read_template(spec.chat_template) if spec.chat_template else ""
        # a PromptTokenizer references its tokenizer, so no other tokenizer has this id while it is found here
        key = (id(tokenizer), replace(spec, path="", chat_template=template))
        prompt_tokenizer = self._prompt_tokenizers.get(key)
        if prompt_tokenizer is None:
            options = EngineOptions(
                template,
                spec.content_format,
                msgspec.json.decode(spec.template_kwargs),
                spec.trust_request_chat_template,
                spec.exclude_tools_when_tool_choice_none,
                spec.max_model_len or None,
            )
            prompt_tokenizer = PromptTokenizer(tokenizer, options, spec.cache_bytes)
            self._prompt_tokenizers[key] = prompt_tokenizer
        return prompt_tokenizer

    def load_tokenizer(self, path: str) -> Tokenizer:
        """Return the same object for equal files, in this or another directory. Raises OSError, ValueError."""
        path = os.path.abspath(os.path.expanduser(path))
        file = check_tokenizer_path(path)
        location = (file, *_file_stamps(os.path.dirname(file)))
        tokenizer = self._tokenizers.get(location)
        if tokenizer is None:
            loaded = load_tokenizer(path)
            content = (
                loaded.fingerprint,
                *(tuple(sorted(table.items())) for table in (loaded.templates, loaded.special_tokens)),
                loaded.inexact_reason,
                loaded.chat_inexact_reason,
            )
            tokenizer = self._tokenizers[location] = self._tokenizers.setdefault(content, loaded)
        return tokenizer


def check_tokenizer_path(path: str) -> str:
    """Return the tokenizer.json at a path, which is that file or its directory. Raises OSError, ValueError."""
    path = os.path.abspath(os.path.expanduser(path))
    file = os.path.join(path, "tokenizer.json") if os.path.isdir(path) else path
    if not file.endswith(".json"):
        os.stat(file)
        raise ValueError(f"{file}: not a tokenizer.json")
    _check_regular_file(file)
    return file


def read_template(path: str) -> str:
    """Read a chat template from a file. Raises OSError, ValueError."""
    path = os.path.expanduser(path)
    _check_regular_file(path)
    text = Path(path).read_text(encoding="utf-8")
    if not text.strip():
        raise ValueError(f"{path}: empty file")
    try:
        ChatTemplate(text, {})
    except TemplateRejected as problem:
        raise ValueError(f"{path}: not a chat template: {problem}") from None
    return text


def load_error_reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return f"{error or type(error).__name__}"[:_MAX_REASON_LENGTH]


def _check_regular_file(path: str) -> None:
    """Refuse pipes and devices, which may never end. Raises OSError, ValueError."""
    found = os.stat(path)
    if not stat.S_ISREG(found.st_mode):
        raise ValueError(f"{path}: not a regular file")
    if found.st_size > _MAX_FILE_BYTES:
        raise ValueError(f"{path}: too large, {found.st_size} bytes")


def _file_stamps(folder: str) -> list[tuple[str, int, int]]:
    """Return name, modification time and size of the files that belong to a tokenizer."""
    with os.scandir(folder) as found:
        files = [entry for entry in found if entry.name.endswith((".json", ".jinja")) and entry.is_file()]
        return sorted((entry.name, entry.stat().st_mtime_ns, entry.stat().st_size) for entry in files)


# What the registry knows about the tokenizer of one model, for operators.


@dataclass(frozen=True, slots=True)
class TokenizerStatus:
    model: str
    state: Literal["loaded", "loading", "missing"]
    path: str = ""
    source: str = ""
    """`configured`, `node_path`, `hugging_face_cache` or `download`; empty without a tokenizer."""
    hub_id: str = ""
    """The model's name on the hub, if its nodes report one."""
    reason: str = ""
    """Why there is no tokenizer."""
    tokenizer: PromptTokenizer | None = None


def models_table(model: str, hub_id: str, has_table: bool) -> str:
    """Return the lines of TOML that configure a tokenizer. `has_table`: [[models]] already has this name."""
    folder = (hub_id or model).rpartition("/")[2] or "model"
    tokenizer = f"tokenizer = {_quoted(f'/models/{folder}')}  # directory with tokenizer.json, on the router's machine"
    if has_table:
        return f"# in the [[models]] table with name = {_quoted(model)}\n{tokenizer}"
    return f"[[models]]\nname = {_quoted(model)}\n{tokenizer}"


def _quoted(text: str) -> str:
    """A basic string of TOML. JSON's escapes are valid there; DEL is the one character that JSON leaves unescaped."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


# Read the model cards in a node's /v1/models: where each model's files are, and which entries are LoRA adapters.


@dataclass(frozen=True, slots=True)
class ModelRoot:
    path: str
    """The model's path on the node, or its name on a hub; empty where the card names neither."""
    max_model_len: int
    """The model's context window; 0 where the card does not say it."""


@dataclass(slots=True)
class ListedModels:
    roots: dict[str, ModelRoot] = field(default_factory=dict)
    """Root and window of each model, without adapters."""
    adapters: dict[str, str] = field(default_factory=dict)
    """Base model of each adapter."""


def read_model_cards(cards: Sequence[Mapping[str, object]], configured: Iterable[str] = ()) -> ListedModels:
    """Ignores invalid cards. `configured`: names of models in the configuration."""
    listed = ListedModels()
    parents: dict[str, str] = {}
    for card in cards:
        name, root, parent, max_len = (card.get(key) for key in ("id", "root", "parent", "max_model_len"))
        if not isinstance(name, str):
            continue
        if isinstance(parent, str) and parent and parent != name:
            parents[name] = parent
        else:
            length = max_len if type(max_len) is int and max_len > 0 else 0
            listed.roots[name] = ModelRoot(root if isinstance(root, str) else "", length)
    for adapter, parent in parents.items():
        # an adapter may name a base model that the node does not serve under that name
        is_known = parent in listed.roots or parent in configured
        listed.adapters[adapter] = parent if is_known else next(iter(listed.roots), parent)
    return listed


# The registry of tokenizers: which PromptTokenizer belongs to which model.
#
# A tokenizer is configured (`[[models]] tokenizer`) or discovered: a node's /v1/models names as `root` a path that also
# exists on this machine, or a name on a hub whose files are on this machine (hub.py). The router trusts its
# nodes that far (`TokenizerLoader` says what it opens at such a path).
#
# One thread loads the files, one tokenizer after the other. Meanwhile the previous tokenizer stays in use, or text
# matching where there is none. The event loop only compares specs:
#
#     desired    from the configuration and the nodes' latest model cards
#     loaded     the tokenizer in use was made from this spec
#     loading    the thread is loading this spec; the result is used if it is still desired
#     failed     the spec could not be loaded; it is tried again after RETRY_S if it is still desired

log = EventLog("warmroute.prompt")
Result = TypeVar("Result")

RETRY_S: Final = 300.0
"""How long after a failure a spec is loaded again."""

LocateTokenizer = Callable[[str, bool], Awaitable[tuple[str, HubSource]]]
"""Searches the files of a name on the hub, and may download them if the second argument is true."""


@dataclass(slots=True)
class _Entry:
    tokenizer: PromptTokenizer | None = None
    loaded: TokenizerSpec | None = None
    loading: TokenizerSpec | None = None
    failed: bool = False
    """Whether the desired spec could not be loaded."""
    failure: str = ""
    """Why the last spec could not be loaded."""
    compared: set[str] = field(default_factory=set)
    """Other paths that nodes name for this model; their tokenizers were compared with the one in use."""


class TokenizerRegistry:
    """Belongs to one event loop. Only `prompt_tokenizer` is called for each request. Must be closed."""

    def __init__(
        self,
        prompts: Prompts,
        models: Sequence[ModelConfig],
        now: Callable[[], float] = time.monotonic,
        locate: LocateTokenizer | None = None,
    ) -> None:
        """Without `locate`, names on a hub are not searched."""
        # constant
        self._now = now
        # One thread: loading takes seconds of CPU, and two at once would take the event loop's core.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="warmroute-tokenizers")
        self._loader = TokenizerLoader()
        """Used in the thread only."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        self.text_matching = PromptTokenizer(None)
        self._reported: WeakSet[PromptTokenizer] = WeakSet()
        """Tokenizers whose disabled tail rendering was logged."""
        self._reported_layouts: WeakSet[PromptTokenizer] = WeakSet()
        """Tokenizers whose disabled chat layouts were logged."""
        self._reported_templates: WeakSet[PromptTokenizer] = WeakSet()
        """Tokenizers whose disabled chat templates were logged."""

        # until the next reconfiguration
        self._prompts = prompts
        self._models = {model.name: model for model in models}

        # changes with nodes and files
        self._listed: dict[str, ListedModels] = {}
        """What each node lists."""
        self._entries: dict[str, _Entry] = {}
        self._retry_at_s: dict[TokenizerSpec, float] = {}
        """When a spec that could not be loaded is tried again."""
        self._adapters: dict[str, str] = {}
        """Base model of each LoRA adapter."""
        self.by_model: dict[str, PromptTokenizer] = {}
        """The tokenizers that are loaded, by model or adapter. Prompts for other models are matched as text."""
        search = None if locate is None else lambda hub_id: locate(hub_id, self._prompts.download_tokenizers)
        self._hub = HubTokenizers(search, now, self._start, self._located)

    def prompt_tokenizer(self, model: str) -> PromptTokenizer:
        """Return the model's tokenizer; where none is loaded, one that uses text matching."""
        return self.by_model.get(model, self.text_matching)

    @property
    def is_loading(self) -> bool:
        """Whether the first tokenizer of a model is being loaded."""
        return any(entry.loading is not None and entry.tokenizer is None for entry in self._entries.values())

    # ---- What is desired ----

    def start_loading(self) -> None:
        """Load what the configuration names, in the background. Until then, prompts are matched by their text."""
        self._reconcile(self._models)

    async def load_configured(self) -> None:
        """Load what the configuration names, to find out whether it can be loaded. Raises ConfigError."""
        problems: list[str] = []
        for model in self._models.values():
            try:
                if model.tokenizer:
                    spec = self._spec(model, model.tokenizer, model.max_model_len)
                    self._use(model.name, spec, await self._in_thread(self._loader.load, spec))
                elif model.chat_template:
                    await self._in_thread(read_template, model.chat_template)
            except Exception as error:  # files may contain anything
                reason = load_error_reason(error)
                problems.append(f"models: cannot load the tokenizer of {model.name!r}: {reason}")
        if problems:
            raise ConfigError(*problems)

    def set_model_cards(self, node: str, cards: Sequence[Mapping[str, object]]) -> None:
        before, listed = self._listed.get(node), read_model_cards(cards, self._models)
        if listed == before:
            entries = ((model, self._entries.get(model)) for model in listed.roots)
            self._reconcile([model for model, entry in entries if entry is None or entry.failed])
            return
        self._listed[node] = listed
        self._listed_changed()
        self._reconcile([*listed.roots, *(before.roots if before is not None else ())])

    def remove_node(self, node: str) -> None:
        """Forget the paths and adapters that only this node named."""
        before = self._listed.pop(node, None)
        if before is not None:
            self._listed_changed()
            self._reconcile(before.roots)

    def _listed_changed(self) -> None:
        nodes = [{model: root.path for model, root in listed.roots.items()} for listed in self._listed.values()]
        self._hub.set_roots(nodes)
        named = {*self._hub.paths, *(model.tokenizer for model in self._models.values())}
        named.update(path for roots in nodes for path in roots.values())
        for spec, at_s in list(self._retry_at_s.items()):
            if spec.path not in named and at_s <= self._now():
                del self._retry_at_s[spec]
        self._adapters = {}
        for listed in self._listed.values():
            for adapter, base in listed.adapters.items():
                self._adapters.setdefault(adapter, base)
        self._update_prompt_tokenizers()

    def reconfigure(self, prompts: Prompts, models: Sequence[ModelConfig]) -> None:
        """Use a changed configuration. Unchanged models keep their tokenizer and its cache.

        Changed models keep the previous tokenizer until the new one is loaded, and also if loading fails.
        """
        models_before, self._models = self._models, {model.name: model for model in models}
        if prompts != self._prompts or self._models != models_before:
            self._retry_at_s.clear()
            self._hub.search_again()
        self._prompts = prompts
        listed = (model for listed in self._listed.values() for model in listed.roots)
        self._reconcile([*self._models, *self._entries, *listed])

    def _spec(self, model: ModelConfig, path: str, max_model_len: int) -> TokenizerSpec:
        format = model.chat_template_content_format
        return TokenizerSpec(
            path,
            model.chat_template,
            None if format == "auto" else format,
            msgspec.json.encode(model.default_chat_template_kwargs, order="deterministic"),
            model.trust_request_chat_template,
            model.exclude_tools_when_tool_choice_none,
            max_model_len,
            self._prompts.cache_bytes,
        )

    def _desired(self, name: str) -> TokenizerSpec | None:
        model = self._models.get(name) or ModelConfig(name=name)
        if model.tokenizer:
            return self._spec(model, model.tokenizer, model.max_model_len)
        if not self._prompts.discover_tokenizers:
            return None
        paths = self._local_paths(name)
        specs = [self._spec(model, path, model.max_model_len or max_len) for path, max_len in paths.items()]
        entry = self._entries.get(name)
        in_use = entry.loaded.path if entry is not None and entry.loaded is not None else ""
        # first the path in use, as long as a node names it; last those that failed
        # Nodes of one model may name different paths. Without an order, the tokenizer would change with each poll.
        specs.sort(key=lambda spec: (spec.path != in_use, self._waits_for_retry(spec)))
        return specs[0] if specs else None

    def _local_paths(self, model: str) -> dict[str, int]:
        """Return the local paths that nodes name for a model, in the order in which the nodes came.

        The values are the smallest max_model_len that a node reports with this path, 0 where none does.
        """
        lengths: dict[str, int] = {}
        for listed in self._listed.values():
            root = listed.roots.get(model)
            if root is not None and (path := self._local_path(model, root.path)):
                known = lengths.get(path, 0)
                lengths[path] = min(known, root.max_model_len) or known or root.max_model_len
        return lengths

    def _local_path(self, model: str, root: str) -> str:
        """Return the path of a model card on this machine; empty if it is not known (yet)."""
        return root if os.path.isabs(root) else self._hub.path(hub_id_of(model, root))

    def _located(self, hub_id: str) -> None:
        self._reconcile(self._hub.models(hub_id))

    def _nodes_with(self, model: str, path: str) -> str:
        nodes = [node for node, listed in self._listed.items() if model in listed.roots]
        nodes = [node for node in nodes if self._local_path(model, self._listed[node].roots[model].path) == path]
        return ", ".join(nodes[:3]) + (f" and {len(nodes) - 3} more" if len(nodes) > 3 else "")

    def _is_configured(self, model: str) -> bool:
        return model in self._models and bool(self._models[model].tokenizer)

    def _waits_for_retry(self, spec: TokenizerSpec) -> bool:
        return spec in self._retry_at_s and self._now() < self._retry_at_s[spec]

    # ---- Loading ----

    def _reconcile(self, models: Iterable[str]) -> None:
        """Start to load the desired specs that are neither loaded nor being loaded."""
        for model in dict.fromkeys(models) if not self._closed else ():
            desired = self._desired(model)
            if desired is None:
                if self._entries.pop(model, None) is not None:
                    self._update_prompt_tokenizers()
                continue
            entry = self._entries.setdefault(model, _Entry())
            if desired == entry.loaded:
                entry.loading, entry.failed = None, False
                self._compare_other_paths(model, entry)
            elif self._waits_for_retry(desired):
                entry.loading, entry.failed = None, True
            elif desired != entry.loading:
                entry.loading = desired
                self._start(self._load(model, desired))

    async def _load(self, model: str, spec: TokenizerSpec) -> None:
        try:
            tokenizer = await self._in_thread(self._loader.load, spec)
        except Exception as error:  # files may contain anything
            self._record_failure(model, spec, load_error_reason(error))
            self._reconcile([model])  # another node may name another path
            return
        entry = self._entries.get(model)
        if entry is not None and entry.loading == spec:
            self._use(model, spec, tokenizer)
            self._compare_other_paths(model, self._entries[model])

    def _use(self, model: str, spec: TokenizerSpec, prompt_tokenizer: PromptTokenizer) -> None:
        self._retry_at_s.pop(spec, None)
        self._entries[model] = _Entry(prompt_tokenizer, spec)
        self._update_prompt_tokenizers()
        tokenizer = prompt_tokenizer.tokenizer
        assert tokenizer is not None
        reasons = {
            "inexact_reason": tokenizer.inexact_reason or tokenizer.chat_inexact_reason,
            "slow_reason": tokenizer.slow_reason,
        }
        present = {name: reason for name, reason in reasons.items() if reason}
        log.info(
            "tokenizer_loaded",
            "The router tokenizes this model's prompts.",
            model=model,
            path=spec.path,
            source=self._source(model, spec.path),
            **present,
        )

    def _record_failure(self, model: str, spec: TokenizerSpec, reason: str) -> None:
        is_new = spec not in self._retry_at_s
        self._retry_at_s[spec] = self._now() + RETRY_S
        entry = self._entries.get(model)
        if entry is None or entry.loading != spec:
            return  # no longer desired
        entry.loading, entry.failed, entry.failure = None, True, reason
        if entry.tokenizer is None and not self._is_configured(model):
            self._hub.forget(spec.path)
        if not is_new:
            return
        sentence = "The router keeps the previous tokenizer."
        if entry.tokenizer is None:
            sentence = "The router matches this model's prompts by their text."
        fields = {"model": model, "path": spec.path, "reason": reason}
        if self._is_configured(model):
            log.error("tokenizer_load_failed", sentence, **fields)
        else:
            sentence += " The path comes from the node; set [[models]] tokenizer to a path on this machine."
            log.warning("tokenizer_load_failed", sentence, **fields, node=self._nodes_with(model, spec.path))

    def _compare_other_paths(self, model: str, entry: _Entry) -> None:
        """Compare the tokenizer in use with those at other paths that nodes name: they should be equal."""
        if entry.loaded is None or self._is_configured(model):
            return
        for path in self._local_paths(model):
            if path != entry.loaded.path and path not in entry.compared:
                entry.compared.add(path)
                self._start(self._compare(model, entry, path))

    async def _compare(self, model: str, entry: _Entry, path: str) -> None:
        try:
            tokenizer = await self._in_thread(self._loader.load_tokenizer, path)
        except Exception:  # the path does not exist on this machine
            return
        if self._entries.get(model) is not entry or entry.loaded is None or entry.tokenizer is None:
            return
        used = entry.tokenizer.tokenizer
        if used is not None and tokenizer is not used:
            log.warning(
                "tokenizer_mismatch",
                "Prompts for this node get wrong tokens, so its cache is not used. Serve the same files on all nodes,"
                " or give the models different names.",
                model=model,
                node=self._nodes_with(model, path),
                differs="chat_template" if tokenizer.fingerprint == used.fingerprint else "tokenizer",
                path=path,
                path_in_use=entry.loaded.path,
            )

    def _update_prompt_tokenizers(self) -> None:
        models = {model: entry.tokenizer for model, entry in self._entries.items() if entry.tokenizer is not None}
        adapters = {adapter: models[base] for adapter, base in self._adapters.items() if base in models}
        self.by_model = {**adapters, **models}

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _in_thread(self, work: Callable[..., Result], *arguments: Any) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)

    # ---- Reports ----

    def status(self, model: str) -> TokenizerStatus:
        """Return where the tokenizer of a base model comes from, or why there is none."""
        entry, roots = self._entries.get(model), self._roots(model)
        hub_id = next(filter(None, (hub_id_of(model, root) for root in roots if not os.path.isabs(root))), "")
        if entry is not None and entry.tokenizer is not None and entry.loaded is not None:
            path = entry.loaded.path
            return TokenizerStatus(model, "loaded", path, self._source(model, path), hub_id, "", entry.tokenizer)
        if (entry is not None and entry.loading is not None) or self._hub.is_searching(hub_id):
            return TokenizerStatus(model, "loading", hub_id=hub_id)
        if entry is not None and entry.failed:
            reason = entry.failure
        elif not self._prompts.discover_tokenizers:
            reason = "the router does not look for tokenizers"
        else:
            reason = self._hub.missing_reason(hub_id) or "its nodes report neither a path nor a name on a hub"
        return TokenizerStatus(model, "missing", hub_id=hub_id, reason=reason)

    def base_model(self, model: str) -> str:
        """Return the model whose tokenizer this model uses: itself, or the base of a LoRA adapter."""
        return model if model in self._entries else self._adapters.get(model, model)

    def listed_models(self) -> list[str]:
        """Return the base models that nodes serve."""
        return list(dict.fromkeys(model for listed in self._listed.values() for model in listed.roots))

    def is_named(self, model: str) -> bool:
        """Return whether a [[models]] table has this name."""
        return model in self._models

    def _roots(self, model: str) -> list[str]:
        return [listed.roots[model].path for listed in self._listed.values() if model in listed.roots]

    def _source(self, model: str, path: str) -> str:
        return "configured" if self._is_configured(model) else self._hub.source(path) or "node_path"

    # ---- Upkeep ----

    async def verify_samples(self) -> None:
        """Let each tokenizer verify a recent prompt, in the thread. To be called about once a second."""
        tokenizers = {entry.tokenizer for entry in self._entries.values() if entry.tokenizer is not None}
        if self._closed or not tokenizers:
            return
        await self._in_thread(_verify_samples, tokenizers)
        self._report_disabled_templates(tokenizers)
        for tokenizer in tokenizers:
            chats = tokenizer.chats
            if chats is not None and chats.failed_checks and tokenizer not in self._reported:
                self._reported.add(tokenizer)
                log.warning(
                    "tail_rendering_disabled",
                    "A conversation showed that the chat template depends on messages far back. The router now"
                    " tokenizes all conversations of this model as a whole, which is slower.",
                    model=self._models_of(tokenizer),
                )
            if chats is not None and chats.failed_layouts and tokenizer not in self._reported_layouts:
                self._reported_layouts.add(tokenizer)
                log.warning(
                    "chat_layout_disabled",
                    "A conversation showed that the chat template prints more than fixed texts around messages. The"
                    " router now renders the template for every conversation of this model, which is slower.",
                    model=self._models_of(tokenizer),
                )

    def _models_of(self, tokenizer: PromptTokenizer) -> str:
        return ", ".join(model for model, found in self.by_model.items() if found is tokenizer)

    def _report_disabled_templates(self, tokenizers: Iterable[PromptTokenizer]) -> None:
        for tokenizer in set(tokenizers) - set(self._reported_templates):
            if reason := tokenizer.disabled_template_reason:
                self._reported_templates.add(tokenizer)
                log.warning(
                    "chat_template_disabled",
                    "Rendering an ordinary conversation exceeded the router's limits. The router matches this model's"
                    " chats by their text.",
                    model=self._models_of(tokenizer),
                    reason=reason,
                )

    async def until_loaded(self) -> None:
        """Wait until no tokenizer is being searched or loaded."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def close(self) -> None:
        """Return at once. The thread ends after its current work."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        self._thread.shutdown(wait=False, cancel_futures=True)


def _verify_samples(tokenizers: Iterable[PromptTokenizer]) -> None:
    for tokenizer in tokenizers:
        try:
            tokenizer.verify_sample()
        except Exception as error:  # its message may contain a user's text
            log.warning("prompt_verification_failed", "The router skips this sample.", reason=where_it_failed(error))
