"""Checks that the built live page in src/warmroute/app/page belongs to its sources in ui/.

python tools/check_page.py            compare the committed build with a hash of its sources; run by `make lint`
python tools/check_page.py --write    note the hash after a build; run by `make page`

So a clone needs no Node.js: the build is committed, and this check fails if somebody changed the sources only.
"""

from __future__ import annotations

import sys
from hashlib import sha256
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("ui/index.html", "ui/package.json", "ui/package-lock.json", "ui/tsconfig.json", "ui/vite.config.ts")
FOLDERS = ("ui/src", "ui/public")
THEME = "src/warmroute/theme.css"
BUILT = ROOT / "src/warmroute/app/page"
NOTE = BUILT / "sources.sha256"


def digest() -> str:
    """Return a hash of all sources and of all built files."""
    files = [ROOT / name for name in (*SOURCES, THEME)]
    files += [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file()]
    files += [path for path in BUILT.iterdir() if path != NOTE]
    total = sha256()
    for path in sorted(files):
        total.update(f"{path.relative_to(ROOT)}\0{sha256(path.read_bytes()).hexdigest()}\n".encode())
    return total.hexdigest()


def main() -> int:
    if "--write" in sys.argv:
        NOTE.write_text(digest() + "\n")
        return 0
    if not NOTE.exists() or NOTE.read_text().strip() != digest():
        print("the built live page does not belong to its sources in ui/: run `make page` and commit the result")
        return 1
    print("page: the build belongs to its sources")
    return 0


if __name__ == "__main__":
    sys.exit(main())
