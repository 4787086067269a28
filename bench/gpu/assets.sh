#!/usr/bin/env bash
# Collects what an offline GPU machine needs, on a machine with a package index: wheels of the router's dependencies and
# of the engine's server, and a tokenizer. About 25 MB.
#
#     bench/gpu/assets.sh build/gpu TOKENIZER_DIR [PYTHON_VERSION]
#
# TOKENIZER_DIR has tokenizer.json, tokenizer_config.json and chat_template.jinja, such as those of Qwen3-8B.
# PYTHON_VERSION is that of the GPU machine's python3 (default 3.12), which has torch and transformers already.
set -eu
to=$1 tokenizer=$2 version=${3:-3.12}
root=$(cd "$(dirname "$0")/../.." && pwd)
mkdir -p "$to/wheels" "$to/tokenizer"
cp "$tokenizer"/tokenizer.json "$tokenizer"/tokenizer_config.json "$tokenizer"/chat_template.jinja "$to/tokenizer/"
chmod -R u+w "$to/tokenizer"
# transformers and what it needs are on the GPU machine. Of the router's own dependencies, tokenizers is, too.
grep -E '^(fastokens|jinja2|markdown-it-py|markupsafe|mdurl|msgspec|pygments|pyzmq|rich|uvloop)==' "$root/requirements.lock" > "$to/requirements.txt"
printf '%s\n' fastapi uvicorn openai python-multipart typer "setuptools>=77" wheel >> "$to/requirements.txt"
"${PYTHON:-python3}" -m pip download --quiet --disable-pip-version-check --dest "$to/wheels" --python-version "$version" \
    --only-binary=:all: --platform manylinux2014_x86_64 --platform manylinux_2_28_x86_64 --requirement "$to/requirements.txt"
du -sh "$to"
