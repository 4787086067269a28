"""Run vLLM's OpenAI server with LMCache on a CPU. Run by a Python that has both, with the server's flags.

LMCache 0.5 copies KV caches of CUDA, XPU, HPU and MUSA devices, and not those of a CPU: this adds it, with plain
PyTorch. All else is LMCache's own: chunks, hashes, storage, lookups, and vLLM's adapter.
"""

import importlib.abc
import importlib.util
import runpy
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

CONNECTORS = "lmcache.v1.gpu_connector"


def connector_for(interface: type, metadata: Any) -> Any:
    """Return a connector between the KV cache of vLLM's layers, [blocks, heads, block size, 2 × head size], and
    LMCache's chunks, [2, layers, tokens, hidden size]."""
    import torch

    layers, _, _, heads, head_size = metadata.kv_shape

    class CpuConnector(interface):  # type: ignore[misc]
        kvcaches: Any = None

        def get_shape(self, num_tokens: int) -> Any:
            return torch.Size([2, layers, num_tokens, heads * head_size])

        def _slots(self, start: int, end: int, options: dict[str, Any]) -> tuple[list[Any], Any, Any]:
            self.initialize_kvcaches_ptr(**options)
            caches = list(self.kvcaches.values()) if isinstance(self.kvcaches, dict) else list(self.kvcaches)
            slots, size = options["slot_mapping"][start:end], caches[0].shape[2]
            return caches, slots // size, slots % size

        def to_gpu(self, memory_obj: Any, start: int, end: int, **options: Any) -> None:
            caches, blocks, offsets = self._slots(start, end, options)
            for layer, cache in enumerate(caches):
                found = memory_obj.tensor[:, layer].reshape(2, len(blocks), heads, head_size)
                cache[blocks, :, offsets] = torch.cat((found[0], found[1]), dim=-1)

        def from_gpu(self, memory_obj: Any, start: int, end: int, **options: Any) -> None:
            caches, blocks, offsets = self._slots(start, end, options)
            for layer, cache in enumerate(caches):
                keys, values = cache[blocks, :, offsets].split(head_size, dim=-1)
                memory_obj.tensor[0, layer].copy_(keys.reshape(len(blocks), -1))
                memory_obj.tensor[1, layer].copy_(values.reshape(len(blocks), -1))

        def batched_to_gpu(self, memory_objs: Any, starts: Any, ends: Any, **options: Any) -> None:
            for one in zip(memory_objs, starts, ends, strict=True):
                self.to_gpu(*one, **options)

        def batched_from_gpu(self, memory_objs: Any, starts: Any, ends: Any, **options: Any) -> None:
            for one in zip(memory_objs, starts, ends, strict=True):
                self.from_gpu(*one, **options)

    return CpuConnector()


class ConnectorFinder(importlib.abc.MetaPathFinder):
    """Replaces LMCache's choice of a connector when vLLM imports it. Before that, LMCache must not be imported: vLLM's
    start fails."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != CONNECTORS:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        assert spec is not None and spec.loader is not None
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            interface = module.GPUConnectorInterface
            create = lambda _config, metadata, *_args, **_options: connector_for(interface, metadata)  # noqa: E731
            setattr(module, "CreateGPUConnector", create)  # noqa: B010

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if __name__ == "__main__":
    sys.meta_path.insert(0, ConnectorFinder())
    runpy.run_path(str(Path(__file__).parent / "serve_forked.py"), run_name="__main__")
