"""`make bench`: the request path stage by stage, the index where its traces are, the peers where their harness is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from index import MOONCAKE, TRACES

HERE = Path(__file__).resolve().parent


def main() -> int:
    for script in ("path.py", "index.py", "peers.py"):
        print(f"\n== bench/{script}", flush=True)
        if script == "index.py" and not all((TRACES / name).exists() for name in MOONCAKE):
            print(f"not run: its traces are not in {TRACES}; WARMROUTE_TRACES may name another folder", flush=True)
            continue
        code = subprocess.run([sys.executable, str(HERE / script)]).returncode
        if code:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
