"""Run vLLM's OpenAI server with forked child processes. Run by vLLM's Python, with the server's flags.

On a CPU, vLLM spawns three processes that each import everything. Forked ones need a third of the CPU time to start.
The `vllm` command does not work in the CPU build, so this runs the server's module.

NIXL's progress thread never sleeps: two engines would take both cores of a small machine and answer after half a
minute. Without that thread, vLLM's own steps progress the transfers.
"""

import functools
import importlib
import multiprocessing
import runpy
import sys

CONTEXT = multiprocessing.get_context("fork")
MODULES = ("vllm.utils.system_utils", "vllm.v1.engine.utils", "vllm.v1.executor.multiproc_executor")
"""Modules that define `get_mp_context` or import it by name."""

if __name__ == "__main__":
    for name in MODULES:
        importlib.import_module(name).get_mp_context = lambda *_args, **_options: CONTEXT  # type: ignore[attr-defined]
    nixl = importlib.import_module("vllm.distributed.nixl_utils")
    if nixl.nixl_agent_config is not None:
        nixl.nixl_agent_config = functools.partial(nixl.nixl_agent_config, enable_prog_thread=False)  # type: ignore[attr-defined]
    sys.argv[0] = "api_server"
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)
