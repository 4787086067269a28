#!/bin/sh
# Installs the newest wheel of dist/ (or of $WHEELS) into an empty environment with no compiler on its PATH, and runs the router's demo.
#   sh tools/check_wheel.sh [PYTHON]
set -eu
unset PYTHONPATH    # a package that it shows would not be installed
python=${1:-python3}
here=$(cd "$(dirname "$0")/.." && pwd)
tag=$("$python" -c 'import sys; print(f"cp{sys.version_info[0]}{sys.version_info[1]}")')
wheel=$(ls -t "${WHEELS:-$here/dist}"/warmroute-*-"$tag"-*.whl | head -1)
where=$(mktemp -d)
trap 'rm -rf "$where"' EXIT
"$python" -m venv "$where/venv"
cd "$where"
CC=/bin/false CXX=/bin/false "$where/venv/bin/python" -m pip install --quiet --disable-pip-version-check --only-binary :all: "$wheel"
"$where/venv/bin/warmroute" --version | grep "(compiled)"
"$where/venv/bin/warmroute" demo --only compare --exit
echo "wheel: $(basename "$wheel") installs and runs without a compiler"
