#!/bin/sh
# The steps of the Containerfile.
#
#   steps.sh wheels PYTHON SOURCE WHEELS     build the router's wheel, and download those of its dependencies
#   steps.sh install PYTHON WHEELS TARGET    install from these wheels alone into an environment at TARGET
set -eu
unset PYTHONPATH    # a package that it shows would not be installed
step=$1 python=$2
case $step in
wheels)
    source=$3 wheels=$4
    mkdir -p "$wheels"
    "$python" -m pip download --quiet --disable-pip-version-check --only-binary :all: --dest "$wheels" \
        --requirement "$source/requirements-image.lock"
    sh "$source/tools/build_wheel.sh" "$python" "$source" "$wheels"
    ;;
install)
    wheels=$3 target=$4
    "$python" -m venv "$target"
    "$target/bin/python" -m pip install --quiet --disable-pip-version-check --no-index --find-links "$wheels" \
        --no-compile "warmroute[dns,keda,kubernetes,picker,redis]"
    "$target/bin/python" -m pip uninstall --quiet --yes pip setuptools wheel 2>/dev/null || true
    "$target/bin/python" -m compileall -q "$target/lib"
    ;;
*)
    echo "steps.sh: wheels or install" >&2
    exit 2
    ;;
esac
