"""Tokenize all requests in sample_requests.py with vLLM and the small model, and write golden_tokens.json.

python tests/prompt/make_golden_tokens.py
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from sample_requests import SAMPLE_REQUESTS  # noqa: E402
from vllm_reference import tokenize_with_vllm  # noqa: E402

TEMPLATES = ("thinking", "parts", "alternating")


def main() -> None:
    requests = []
    for name in TEMPLATES:
        folder = tempfile.mkdtemp()
        shutil.copytree(HERE / "small-model", folder, dirs_exist_ok=True)
        shutil.copy(HERE / "templates" / f"{name}.jinja", Path(folder) / "chat_template.jinja")
        requests += [{"tokenizer": folder, "path": path, "body": body} for path, body in SAMPLE_REQUESTS]
    results = tokenize_with_vllm(requests)
    count = len(SAMPLE_REQUESTS)
    golden = {name: results[at * count : (at + 1) * count] for at, name in enumerate(TEMPLATES)}
    separator = ",\n"
    lines = [f'"{name}": [\n{separator.join(map(json.dumps, golden[name]))}\n]' for name in TEMPLATES]
    (HERE / "golden_tokens.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
