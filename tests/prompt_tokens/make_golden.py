"""Asks vLLM for the tokens of all requests in asks.py with the small model, and keeps them in golden.json.

python tests/prompt_tokens/make_golden.py
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from asks import ASKS  # noqa: E402
from oracle import ask_oracle  # noqa: E402

TEMPLATES = ("thinking", "parts", "alternating")


def main() -> None:
    asks = []
    for name in TEMPLATES:
        folder = tempfile.mkdtemp()
        shutil.copytree(HERE / "small-model", folder, dirs_exist_ok=True)
        shutil.copy(HERE / "templates" / f"{name}.jinja", Path(folder) / "chat_template.jinja")
        asks += [{"tokenizer": folder, "path": path, "body": body} for path, body in ASKS]
    answers = ask_oracle(asks)
    golden = {name: answers[at * len(ASKS) : (at + 1) * len(ASKS)] for at, name in enumerate(TEMPLATES)}
    separator = ",\n"
    lines = [f'"{name}": [\n{separator.join(map(json.dumps, golden[name]))}\n]' for name in TEMPLATES]
    (HERE / "golden.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
