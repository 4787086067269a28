#!/bin/sh
# Builds a wheel with the request path compiled by mypyc, a part of mypy.
#
#   tools/build_wheel.sh PYTHON SOURCE FOLDER      SOURCE: a checkout or a source distribution
#
# mypyc reads the types of the dependencies, so the wheel is built in an environment that has them.
set -eu
unset PYTHONPATH    # a package that it shows would not be installed
here=$(cd "$(dirname "$0")/.." && pwd)
python=$1 source=$2 folder=$3
environment=$(mktemp -d)
trap 'rm -rf "$environment"' EXIT
mypy=$(sed -n 's/^\(mypy==[^ ]*\).*/\1/p' "$here/requirements-dev.lock")
"$python" -m venv "$environment"
"$environment/bin/python" -m pip install --quiet --disable-pip-version-check "setuptools>=77" wheel "$mypy" -r "$here/requirements.lock"
WARMROUTE_COMPILE=1 "$environment/bin/python" -m pip wheel --quiet --disable-pip-version-check --no-build-isolation --no-deps \
    --wheel-dir "$folder" "$source"
