"""`make bench`: the request path stage by stage, then beside the peers where their harness is there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def main() -> int:
    for script in ("path.py", "peers.py"):
        print(f"\n== bench/{script}", flush=True)
        code = subprocess.run([sys.executable, str(HERE / script)]).returncode
        if code:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
