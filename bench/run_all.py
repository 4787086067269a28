"""`make bench`: the request path stage by stage, then the index and the comparison with other routers.

    make bench ARGS="--data DIR --harness DIR"

The index benchmark needs --data, the comparison --harness. Without them, the others run.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", metavar="DIR", help="passed to bench/index_throughput.py")
    parser.add_argument("--harness", metavar="DIR", help="passed to bench/peers.py")
    args = parser.parse_args()
    for script, option, value in (
        ("request_path.py", "", ""),
        ("index_throughput.py", "--data", args.data),
        ("peers.py", "--harness", args.harness),
    ):
        if value is None:
            print(f"\n== bench/{script}: not run, because {option} was not given", flush=True)
            continue
        print(f"\n== bench/{script}", flush=True)
        code = subprocess.run([sys.executable, str(HERE / script), *filter(None, (option, value))]).returncode
        if code:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
