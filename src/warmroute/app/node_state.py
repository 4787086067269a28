"""What operators did through the admin API, kept for the next start of the router (`[state]`): drains, roles, and
nodes that they added. It is the part of the register of node changes (core/cluster/shared_nodes.py) that has to
outlive all processes, as a file or in a ConfigMap. One process of a router writes it: the brain.

    {"format": 1, "nodes": [{"name": "gpu-a", "drained": true, "version": 3, "by": "…"}]}

- A write merges with what is there, by the changes' versions, so that routers that overlap in an update lose
  nothing.
- The file is replaced as a whole (new file, fsync, rename, fsync of the directory): a process that is killed at
  any
  moment leaves the former or the new one.
- Content that cannot be read is moved aside, and the router starts without it.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Protocol

import msgspec
from msgspec import Meta

from warmroute.blocking import run_in_thread
from warmroute.config import Config, ConfigError, NodeConfig, State, node_name, parse_section
from warmroute.config.section import missing_extra
from warmroute.core.cluster.messages import MAX_CHANGES, MAX_NODE_BYTES, Count, Name, NodeChange
from warmroute.event_log import EventLog

log = EventLog("warmroute.service")

FORMAT: Final = 1
"""A router that finds another format leaves the file alone."""
FILE: Final = "node-changes.json"
MAX_FILE_BYTES: Final = 32 << 20
"""A larger file is none of ours."""
LOAD_S: Final = 5.0
"""How long the start waits for the state. The router starts without it, and applies it when it arrives."""
WRITE_S: Final = 15.0
"""After this time a disk or an API server that does not answer has failed."""
LOCK_S: Final = 0.5
"""How long a write waits for another process that writes the same file."""
KEPT_S: Final = 0.8
"""How long the admin API waits until a change is kept. It answers within a second."""
FIRST_RETRY_S: Final = 1.0
"""First pause after a failed write. It doubles up to MAX_RETRY_S."""
MAX_RETRY_S: Final = 60.0

Changes = Mapping[str, NodeChange]
Merge = Callable[[bytes], bytes]
"""Gets what is stored, and returns what to store instead."""


class _Entry(msgspec.Struct, omit_defaults=True):
    name: Name
    version: Count
    by: Name = ""
    """The process in which the operator changed it."""
    drained: bool = False
    role: Literal["", "mixed", "prefill", "decode"] = ""
    node: dict[str, Any] | None = None
    """The node as the operator added it."""


class _Content(msgspec.Struct):
    format: int
    nodes: Annotated[list[_Entry], Meta(max_length=MAX_CHANGES)]


_decoder: Final = msgspec.json.Decoder(_Content)


class BadContent(ValueError):
    """The stored content cannot be read, or not all of it."""


class Store(Protocol):
    """Where the state is kept. Its methods raise OSError; `read` and `update` also BadContent."""

    where: str

    async def read(self) -> bytes:
        """Return the content; empty if there is none."""

    async def update(self, merge: Merge) -> None:
        """Replace the content."""

    async def move_aside(self) -> str:
        """Move content that cannot be read out of the way. Return where it is now."""


def create_store(config: State) -> Store | None:
    """Raises ConfigError."""
    if config.directory:
        return FileStore(Path(config.directory).expanduser())
    if config.config_map:
        try:
            from warmroute.kubernetes_api import ConfigMapText
        except ImportError as error:
            raise missing_extra("state.config_map", error, "kubernetes") from None
        return ConfigMapText(config.config_map, FILE)
    return None


class NodeState:
    def __init__(self, config: Config, folder: str = "") -> None:
        """`folder`: where the next brain of the same parent finds it, if the configuration names no place. Raises
        ConfigError."""
        kept = create_store(config.state)
        self.survives_restart = kept is not None
        self._store = store = kept or (FileStore(Path(folder)) if folder else None)
        self._in_redis = bool(config.cluster.url)
        """Without a store, Redis has the changes after a restart."""
        self.changes: dict[str, NodeChange] = {}
        """The last change of each node, also of those that need not be kept."""
        self.on_late_load: Callable[[list[NodeChange]], object] = lambda _changes: None
        """Called with the state if it arrives only after the start."""
        self._loaded = store is None
        self._warned = False
        self._wanted = self._written = 0
        """Changes that have to be kept, and those that are."""
        self._failing = False
        self._attempted = asyncio.Condition()
        self._writing: asyncio.Task[None] | None = None

    async def load(self) -> list[NodeChange]:
        """Return what the process before has kept. Never raises."""
        if self._store is None:
            return []
        try:
            async with asyncio.timeout(LOAD_S):
                return await self._read(self._store)
        except OSError as error:  # also a TimeoutError
            if self._has_failed_first():
                log.error(
                    "state_not_read", "The router starts without the changes of operators. It tries again.",
                    state=self._store.where, reason=_reason(error),
                )  # fmt: skip
            self._start_writing()
            return []

    async def _read(self, store: Store) -> list[NodeChange]:
        """Raises OSError."""
        try:
            changes, problem = decode_state(await store.read())
        except BadContent as error:
            changes, problem = [], str(error)
        self._loaded = True
        for change in changes:
            if change.is_later_than(self.changes.get(change.name)):
                self._remember(change)
        if problem:
            await self._reject(store, problem, len(changes))
        if problem and changes:
            self._wanted += 1
            self._start_writing()
        if changes:
            drained = sorted(change.name for change in changes if change.drained_by_hand)
            log.info(
                "state_restored", "What operators did before the restart holds again.", state=store.where,
                nodes=len(changes), drained=",".join(drained[:8]) + (",…" if len(drained) > 8 else ""),
            )  # fmt: skip
        return changes

    async def _reject(self, store: Store, problem: str, left: int) -> None:
        aside = ""
        try:
            aside = await store.move_aside()
        except OSError as error:
            problem += f"; it cannot be moved: {error.strerror or error}"
            self._failing = True
        log.error(
            "state_rejected", "Changes of operators are lost. Drain again what must be drained.", state=store.where,
            reason=problem, moved_to=aside, nodes_left=left,
        )  # fmt: skip

    def keep(self, change: NodeChange) -> None:
        """Keep a change of this process or of another one."""
        before = self.changes.get(change.name)
        if not change.is_later_than(before):
            return
        self._remember(change)
        if not change.by_hand and (before is None or not before.by_hand):
            return
        if self._store is not None:
            self._wanted += 1
            self._start_writing()
        if not (self.survives_restart or self._warned or self._in_redis):
            self._warned = True
            log.warning(
                "changes_not_kept", "A restart loses the drains, roles and nodes of the admin API. To keep them, set "
                "directory in [state].", node=change.name,
            )  # fmt: skip

    def _remember(self, change: NodeChange) -> None:
        self.changes[change.name] = change
        if len(self.changes) > MAX_CHANGES:
            oldest = min(self.changes.values(), key=lambda one: (not one.removed, one.by_hand, one.version))
            del self.changes[oldest.name]

    async def all_kept(self) -> bool:
        """Wait until the changes so far are kept, but not for long. Return whether they are."""
        if self._store is None:
            return False
        wanted = self._wanted
        with suppress(TimeoutError):
            async with asyncio.timeout(KEPT_S), self._attempted:
                await self._attempted.wait_for(lambda: self._written >= wanted or self._failing)
        return self._written >= wanted

    async def close(self) -> None:
        await self.all_kept()
        if self._writing is not None:
            self._writing.cancel()

    def _start_writing(self) -> None:
        if self._writing is None or self._writing.done():
            self._writing = asyncio.get_running_loop().create_task(self._write())

    async def _write(self) -> None:
        """Read the state if that failed at the start. Write it until all changes are kept."""
        assert self._store is not None
        retry_s = FIRST_RETRY_S
        while not self._loaded or self._written < self._wanted:
            try:
                async with asyncio.timeout(WRITE_S):
                    if not self._loaded:
                        self.on_late_load(await self._read(self._store))
                    else:
                        await self._update(self._store)
                if self._failing:
                    self._failing = False
                    log.info("state_kept", "Changes of operators survive a restart again.", state=self._store.where)
                retry_s = FIRST_RETRY_S
            except BadContent as error:
                await self._reject(self._store, str(error), len(self.changes))
            except OSError as error:
                if self._has_failed_first():
                    log.error(
                        "state_not_kept", "A restart would lose the latest changes of operators. The router tries "
                        "again.", state=self._store.where, reason=_reason(error),
                    )  # fmt: skip
            async with self._attempted:
                self._attempted.notify_all()
            if self._failing:
                await asyncio.sleep(retry_s)
                retry_s = min(MAX_RETRY_S, 2.0 * retry_s)

    async def _update(self, store: Store) -> None:
        wanted, changes = self._wanted, dict(self.changes)
        await store.update(lambda content: merge_state(content, changes))
        self._written = wanted

    def _has_failed_first(self) -> bool:
        """Note a failure. Return whether it is the first one since the last success."""
        first, self._failing = not self._failing, True
        return first


def _reason(error: OSError) -> str:
    return error.strerror or str(error) or "it does not answer"


# What is stored.


def decode_state(content: bytes) -> tuple[list[NodeChange], str]:
    """Return the changes, and what is wrong with others. Raises BadContent if nothing can be read."""
    if not content:
        return [], ""
    try:
        found = _decoder.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadContent(f"it is not what a router writes: {error}") from None
    if found.format != FORMAT:
        raise BadContent(f"it has format {found.format}; this router reads format {FORMAT}")
    changes, problems = list[NodeChange](), list[str]()
    for entry in found.nodes:
        config = msgspec.json.encode(entry.node) if entry.node is not None else b""
        try:
            if len(config) > MAX_NODE_BYTES:
                raise ConfigError("the node is too long")
            if entry.node is not None and node_name(parse_section(NodeConfig, entry.node)) != entry.name:
                raise ConfigError("the node has another name")
        except ConfigError as error:
            problems.append(f"{entry.name[:200]!r}: {error.problems[0][:200]}")
            continue
        changes.append(
            NodeChange(
                entry.name, entry.version, entry.by, config, False, entry.drained, entry.role, entry.drained,
                bool(config), bool(entry.role),
            )
        )  # fmt: skip
    more = f" and {len(problems) - 1} more" if len(problems) > 1 else ""
    return changes, f"node {problems[0]}{more}" if problems else ""


def merge_state(content: bytes, changes: Changes) -> bytes:
    """Return the content with these changes. Raises BadContent if the content cannot be read."""
    stored, problem = decode_state(content)
    if problem:
        raise BadContent(problem)
    later = {one.name: one for one in stored if one.is_later_than(changes.get(one.name))}
    kept = [one for one in ({**changes, **later}).values() if one.by_hand]
    kept = sorted(sorted(kept, key=lambda one: one.version)[-MAX_CHANGES:], key=lambda one: one.name)
    entries = [
        _Entry(
            one.name, one.version, one.sender, one.drained_by_hand, one.role if one.role_by_hand else "",
            msgspec.json.decode(one.config) if one.added_by_hand else None,
        )
        for one in kept
    ]  # fmt: skip
    return msgspec.json.format(msgspec.json.encode(_Content(FORMAT, entries)), indent=1) + b"\n"


# Where it is stored.


class FileStore:
    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._file = directory / FILE
        self.where = str(self._file)

    async def read(self) -> bytes:
        return await run_in_thread(self._read, "state")

    async def update(self, merge: Merge) -> None:
        await run_in_thread(lambda: self._update(merge), "state")

    async def move_aside(self) -> str:
        return await run_in_thread(self._move_aside, "state")

    def _read(self) -> bytes:
        try:
            # O_NONBLOCK: the open of a pipe would wait for a writer
            file = os.open(self._file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return b""
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO):
                raise BadContent("it is not a plain file") from None
            raise
        if not stat.S_ISREG(os.fstat(file).st_mode):
            os.close(file)
            raise BadContent("it is not a plain file")
        with open(file, "rb") as opened:
            content = opened.read(MAX_FILE_BYTES + 1)
        if len(content) > MAX_FILE_BYTES:
            raise BadContent(f"it is larger than {MAX_FILE_BYTES:,} bytes")
        if not content:
            raise BadContent("it is empty")
        return content

    def _update(self, merge: Merge) -> None:
        with suppress(FileExistsError):
            self._directory.mkdir(0o700)
        with self._locked():
            before = self._read()
            content = merge(before)
            if content == before:
                return
            new = self._directory / f"{FILE}.new"
            with suppress(FileNotFoundError):
                new.unlink()  # of a process that was killed
            file = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            with open(file, "wb") as opened:
                opened.write(content)
                opened.flush()
                os.fsync(file)
            os.replace(new, self._file)
            self._sync_directory()

    def _move_aside(self) -> str:
        aside = self._directory / f"{FILE}.bad"
        if aside.exists():
            aside = self._directory / f"{FILE}.bad-{time.time_ns()}"
        os.rename(self._file, aside)
        self._sync_directory()
        return str(aside)

    def _sync_directory(self) -> None:
        """A rename counts after a power failure only if the directory is on the disk, too."""
        directory = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock of the directory. The kernel releases it if the process is killed."""
        directory = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            until_s = time.monotonic() + LOCK_S
            while True:
                try:
                    fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > until_s:
                        raise OSError(errno.EBUSY, "another process holds its lock") from None
                    time.sleep(0.01)
            yield
        finally:
            os.close(directory)
