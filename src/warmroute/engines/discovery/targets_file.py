"""kind = "file": a file in the format of Prometheus' file_sd.

    [{"targets": ["10.0.0.7:8000", "10.0.0.8:8000"], "labels": {"model": "llama", "island": "aws/us-east-1"}}]

The router polls the file, so that it also works on network file systems and with a ConfigMap's links.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from warmroute.blocking import run_in_thread
from warmroute.config import DiscoveryConfig
from warmroute.engines.discovery.target import SourceError, Target, Targets, create_target, split_host_port

POLL_S: Final = 0.5
"""inotify sees no change on NFS, nor behind the link that a ConfigMap is."""
MAX_FILE_BYTES: Final = 4 << 20
"""2,000 targets take about 200 KB."""
SCHEME_LABEL: Final = "__scheme__"

Version = tuple[int, int, int]


class TargetsFile:
    max_retry_s = 2 * POLL_S

    def __init__(self, config: DiscoveryConfig) -> None:
        self._config = config
        self._path = Path(config.file).expanduser()

    async def run(self, report: Callable[[Targets], None]) -> None:
        known, previous = None, self._version()
        while True:
            version = self._version()
            settled, previous = version == previous, version
            if version != known and settled:  # it may be half written before
                report(await run_in_thread(self._read, "targets-file"))
                known = version
            await asyncio.sleep(POLL_S)

    def _version(self) -> Version:
        try:
            found = self._path.stat()
        except OSError as error:
            raise SourceError(f"{self._path}: {error.strerror}") from None
        return found.st_mtime_ns, found.st_size, found.st_ino

    def _read(self) -> Targets:
        try:
            with self._path.open("rb") as file:
                data = file.read(MAX_FILE_BYTES + 1)
        except OSError as error:
            raise SourceError(f"{self._path}: {error.strerror}") from None
        if len(data) > MAX_FILE_BYTES:
            raise SourceError(f"{self._path}: the file is larger than {MAX_FILE_BYTES:,} bytes")
        is_yaml = self._path.suffix in (".yml", ".yaml")
        return read_groups(self._config, _parse_yaml(self._path, data) if is_yaml else _parse_json(self._path, data))


def _parse_json(path: Path, data: bytes) -> Any:
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SourceError(f"{path}: invalid JSON: {error}") from None


def _parse_yaml(path: Path, data: bytes) -> Any:
    try:
        import yaml  # type: ignore[import-untyped]
    except ImportError:
        raise SourceError(f"{path}: YAML needs PyYAML, which is not installed; write JSON instead") from None
    try:
        return yaml.load(data, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise SourceError(f"{path}: invalid YAML: {' '.join(str(error).split())[:300]}") from None


def read_groups(config: DiscoveryConfig, groups: Any) -> Targets:
    """Raises SourceError if this is no list of groups. Ignores single targets that are invalid."""
    if not isinstance(groups, list):
        raise SourceError(f'{config.file}: expected a list of groups: [{{"targets": ["host:port"], "labels": {{…}}}}]')
    found: list[Target] = []
    invalid: list[str] = []
    for group in groups:
        targets = group.get("targets") if isinstance(group, dict) else None
        labels = group.get("labels") if isinstance(group, dict) else None
        if not isinstance(targets, list) or not isinstance(labels or {}, Mapping):
            invalid.append("a group has no list of targets, or its labels are no table")
            continue
        for address in targets:
            target = _read_target(config, address, labels or {}, invalid)
            if target is not None:
                found.append(target)
    return Targets(found, invalid)


def _read_target(
    config: DiscoveryConfig, address: object, labels: Mapping[str, object], invalid: list[str]
) -> Target | None:
    parts = split_host_port(address) if isinstance(address, str) and len(address) < 300 else None
    if parts is None:
        invalid.append(f"a target is {str(address)[:80]!r}, not host:port")
        return None
    scheme = str(labels.get(SCHEME_LABEL))
    return create_target(config, *parts, labels, invalid, scheme=scheme if scheme in ("http", "https") else "")
