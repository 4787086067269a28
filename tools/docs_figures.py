"""Puts figures from bench/results/*.json into the docs, or checks that they are there. Run by `make lint`.

    python tools/docs_figures.py            fail where a page and its result file disagree
    python tools/docs_figures.py --write    update the pages

In a page, a table or a single value stands between two comments:

    <!-- table peers.cpu -->            …the table `cpu` of bench/results/peers.json…       <!-- / -->
    <!-- value peers.price_1kb -->68<!-- / -->
    <!-- command peers -->              …the command that made it, its date and machine…    <!-- / -->

A value may not begin a line: Markdown would read the line as HTML and end the paragraph.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
DIRECTIVE = re.compile(r"<!-- (table|value|command) ([^>\n]+) -->(.*?)<!-- / -->", re.DOTALL)


def pages() -> Iterator[Path]:
    yield ROOT / "README.md"
    yield from sorted((ROOT / "docs").rglob("*.md"))


def expected(kind: str, reference: str) -> str:
    name, _, key = reference.partition(".")
    result: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    if kind == "value":
        return str(result["values"][key])
    if kind == "command":
        return f"\n    {result['command']}\n\n{result['date']}, {result['machine']}.\n"
    table = result["tables"][key]
    rows = [table["columns"], ["---"] * len(table["columns"]), *table["rows"]]
    return "\n" + "".join(f"| {' | '.join(str(cell) for cell in row)} |\n" for row in rows)


def main(write: bool) -> int:
    wrong: list[str] = []
    for page in pages():
        text = page.read_text()

        def replace(match: re.Match[str], page: Path = page, text: str = text) -> str:
            kind, reference, found = match.groups()
            where = f"{page.relative_to(ROOT)}:{text.count(chr(10), 0, match.start()) + 1}"
            try:
                wanted = expected(kind, reference)
            except (OSError, KeyError, ValueError) as error:
                wrong.append(f"{where}: {kind} {reference} is not in bench/results ({type(error).__name__})")
                return match.group(0)
            if kind == "value" and not text[text.rfind("\n", 0, match.start()) + 1 : match.start()].strip():
                wrong.append(f"{where}: value {reference} begins a line")
            if found != wanted and not write:
                wrong.append(f"{where}: {kind} {reference} differs from its result file")
            return f"<!-- {kind} {reference} -->{wanted}<!-- / -->"

        made = DIRECTIVE.sub(replace, text)
        if write and made != text:
            page.write_text(made)
    print("\n".join(wrong) if wrong else "figures: docs and bench/results agree")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main("--write" in sys.argv[1:]))
