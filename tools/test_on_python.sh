#!/bin/sh
# Runs the tests on another Python, in an environment of its own: sh tools/test_on_python.sh python3.13 [pytest arguments]
set -eu
python=$1
shift
here=$(cd "$(dirname "$0")/.." && pwd)
version=$("$python" -c 'import sys; print(f"{sys.version_info[0]}.{sys.version_info[1]}")')
venv="$here/.venv-$version"
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check -r "$here/requirements-dev.lock"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps -e "$here"
cd "$here"
"$venv/bin/python" -m pytest "$@"
