"""Puts figures from bench/results/*.json into the docs, or checks that they are there. Run by `make lint`.

    python tools/docs_figures.py            fail where a page and its result file disagree; warn of stale figures
    python tools/docs_figures.py --write    update the pages
    python tools/docs_figures.py --fresh    fail where a result file is stale (`make release`)

In a page, a table or a single value stands between two comments:

    <!-- table peers.cpu -->            …the table `cpu` of bench/results/peers.json…       <!-- / -->
    <!-- value peers.price_1kb -->68<!-- / -->
    <!-- command peers -->              …the command that made it, its date, code and machine…   <!-- / -->
    <!-- measured peers --><!-- / -->

A result file is stale if the code that it measures has changed since (tools/measured_code.py). Then a line under its
tables and commands says on which commit it was measured, and so does the last value of a paragraph. `measured` moves
that note of a paragraph to its own place.

A value may not begin a line: Markdown would read the line as HTML and end the paragraph.
"""

from __future__ import annotations

import functools
import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from measured_code import RESULTS, ROOT, UndeclaredCode, changed_parts

DIRECTIVE = re.compile(r"<!-- (table|value|command|measured) ([^>\n]+) -->(.*?)<!-- / -->", re.DOTALL)


def pages() -> Iterator[Path]:
    yield ROOT / "README.md"
    yield from sorted((ROOT / "docs").rglob("*.md"))


@functools.cache
def result_of(name: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return result


@functools.cache
def changed(name: str) -> list[str]:
    """Return the parts of the code that have changed since a result was measured."""
    return changed_parts(name, result_of(name)["measured"])


def code_of(name: str) -> str:
    """Return the commit that a result was measured on, or the version where there was no commit."""
    measured = result_of(name)["measured"]
    commit: str = measured["commit"]
    if not commit:
        return f"version {measured['version']}"
    return f"commit {commit.rstrip('+')}{' with changes' if commit.endswith('+') else ''}"


def expected(kind: str, reference: str, notes: bool) -> str:
    """Return what stands in a page. `notes`: whether this value says that its result is stale."""
    name, _, key = reference.partition(".")
    result = result_of(name)
    if kind in ("value", "measured"):
        note = f" (measured on {code_of(name)})" if notes and changed(name) else ""
        return note if kind == "measured" else f"{result['values'][key]}{note}"
    if kind == "command":
        code = f"{code_of(name)} (the code has changed since)" if changed(name) else code_of(name)
        return f"\n    {result['command']}\n\n{result['date']}, {code}, {result['machine']}.\n"
    table = result["tables"][key]
    rows = [table["columns"], ["---"] * len(table["columns"]), *table["rows"]]
    text = "\n" + "".join(f"| {' | '.join(str(cell) for cell in row)} |\n" for row in rows)
    return f"{text}\nMeasured on {code_of(name)}. The code has changed since.\n" if changed(name) else text


def noting(text: str) -> set[int]:
    """Return where the directives begin that note a stale result: one in each paragraph for each result."""
    notes: dict[tuple[int, str], tuple[bool, int]] = {}
    for match in DIRECTIVE.finditer(text):
        kind, reference, _ = match.groups()
        if kind in ("value", "measured"):
            key = (text.count("\n\n", 0, match.start()), reference.partition(".")[0])
            notes[key] = max(notes.get(key, (False, 0)), (kind == "measured", match.start()))
    return {at for _, at in notes.values()}


def main(write: bool, fresh: bool) -> int:
    wrong: list[str] = []
    used: defaultdict[str, set[str]] = defaultdict(set)
    for page in pages():
        text = page.read_text()
        notes = noting(text)

        def replace(match: re.Match[str], page: Path = page, text: str = text, notes: set[int] = notes) -> str:
            kind, reference, found = match.groups()
            where = f"{page.relative_to(ROOT)}:{text.count(chr(10), 0, match.start()) + 1}"
            try:
                wanted = expected(kind, reference, match.start() in notes)
            except (OSError, KeyError, ValueError) as error:
                wrong.append(f"{where}: {kind} {reference} is not in bench/results ({type(error).__name__})")
                return match.group(0)
            used[reference.partition(".")[0]].add(str(page.relative_to(ROOT)))
            if kind == "value" and not text[text.rfind("\n", 0, match.start()) + 1 : match.start()].strip():
                wrong.append(f"{where}: value {reference} begins a line")
            if found != wanted and not write:
                wrong.append(f"{where}: {kind} {reference} differs from its result file")
            return f"<!-- {kind} {reference} -->{wanted}<!-- / -->"

        try:
            made = DIRECTIVE.sub(replace, text)
        except UndeclaredCode as error:
            print(error)
            return 1
        if write and made != text:
            page.write_text(made)
    stale = [name for name in sorted(used) if changed(name)]
    for name in stale:
        places = ", ".join(sorted(used[name]))
        print(f"stale: {name} in {places}: measured on {code_of(name)}; changed since: {', '.join(changed(name))}")
    if fresh and stale:
        wrong.append(f"{len(stale)} results are stale: measure them again (make bench)")
    print("\n".join(wrong) if wrong else "figures: docs and bench/results agree")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main("--write" in sys.argv[1:], "--fresh" in sys.argv[1:]))
