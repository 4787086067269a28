"""Tokenize the requests of prompt_data.py with vLLM, and write golden_tokens.json.

    python tests/prompt/make_golden_tokens.py DIR

DIR contains the public data (tests/README.md). `make test-real` makes the environment with vLLM. An entry is a list of
token ids, or `digest` of a list that would be long or comes from a public tokenizer, or {"error": message}.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from prompt_data import PUBLIC_CASES, SMALL_CASES, digest, find_model, requests  # noqa: E402
from vllm_reference import tokenize_with_vllm  # noqa: E402


def main() -> None:
    data = Path(sys.argv[1])
    cases = [*SMALL_CASES, *PUBLIC_CASES]
    folders = {model: find_model(model, Path(tempfile.mkdtemp()), data) for model in dict(cases)}
    lines: list[dict[str, Any]] = []
    ends = []
    for model, kind in cases:
        lines += [{"tokenizer": str(folders[model]), "path": path, "body": body} for path, body in requests(kind, data)]
        ends.append(len(lines))
    results = tokenize_with_vllm(lines)
    texts, start = [], 0
    for (model, kind), end in zip(cases, ends, strict=True):
        whole = kind == "samples" and (model, kind) in SMALL_CASES
        entries = [digest(each) if isinstance(each, list) and not whole else each for each in results[start:end]]
        texts.append(f'"{model} {kind}": [\n' + ",\n".join(map(json.dumps, entries)) + "\n]")
        start = end
    (HERE / "golden_tokens.json").write_text("{\n" + ",\n".join(texts) + "\n}\n")


if __name__ == "__main__":
    main()
