#!/bin/sh
# Builds a wheel with the request path compiled by mypyc, with a pip of its own.
#
#   tools/build_wheel.sh PYTHON SOURCE FOLDER      SOURCE: the path of a checkout or of a source distribution (.tar.gz)
#
# pip takes a name without a slash for a package of the index, so it gets the absolute path of SOURCE.
set -eu
unset PYTHONPATH    # a package that it shows would not be installed
if [ $# -ne 3 ]; then
    echo "usage: build_wheel.sh PYTHON SOURCE FOLDER" >&2
    exit 2
fi
python=$1 source=$2 folder=$3
if [ -n "$source" ] && [ -f "$source/pyproject.toml" ]; then
    source=$(CDPATH= cd -- "$source" && pwd)
elif [ -f "$source" ] && [ "${source%.tar.gz}" != "$source" ]; then
    source=$(CDPATH= cd -- "$(dirname -- "$source")" && pwd)/$(basename -- "$source")
else
    echo "build_wheel.sh: $source is neither a folder with a pyproject.toml nor a .tar.gz file" >&2
    exit 2
fi
environment=$(mktemp -d)
trap 'rm -rf "$environment"' EXIT
"$python" -m venv "$environment"
WARMROUTE_COMPILE=1 "$environment/bin/python" -m pip wheel --quiet --disable-pip-version-check --no-deps \
    --wheel-dir "$folder" "$source"
