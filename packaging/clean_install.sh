#!/usr/bin/env bash
# Installs petalnode as on a machine without a compiler, and tests what was installed:
#
#   packaging/clean_install.sh source      pip install of what is committed, nothing taken from pip's cache
#   packaging/clean_install.sh wheel       the same of the wheel that is built from it
#   packaging/clean_install.sh locked      the same, and of the rest what packaging/locked has, by its hashes
#   packaging/clean_install.sh compiled    the same of the wheel that the C compiler here has its part in: the compiled kernels
#   packaging/clean_install.sh wheelhouse  from dist/wheelhouse (make wheelhouse), without any index
#
# The virtual environment is in a scratch folder and removed at the end. PYTHON chooses another Python.
set -euo pipefail
export CC=/bin/false CXX=/bin/false LD=/bin/false  # every compilation fails
export PIP_DISABLE_PIP_VERSION_CHECK=1
root=$(cd "$(dirname "$0")/.." && pwd)
from=${1:?source, wheel, locked, compiled or wheelhouse}
case $from in
    source | wheel | locked | compiled | wheelhouse) ;;
    *)
        echo "$from: give source, wheel, locked, compiled or wheelhouse" >&2
        exit 2
        ;;
esac
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
mkdir "$scratch/home" "$scratch/source"
"${PYTHON:-python3}" -m venv "$scratch/venv"
pip=("$scratch/venv/bin/python" -m pip)
constraints=(--constraint "$root/packaging/constraints.txt")
isolation=

if [ "$from" = wheelhouse ]; then
    install=(--no-index --find-links "$root/dist/wheelhouse" petalnode)
    # Whatever index pip is configured with is not asked.
    export PIP_CONFIG_FILE=/dev/null
    unset PIP_INDEX_URL PIP_EXTRA_INDEX_URL PIP_FIND_LINKS
else
    git -C "$root" archive HEAD | tar -x -C "$scratch/source"
    install=("${constraints[@]}" "$scratch/source")
    if [ "$from" = locked ]; then
        "$scratch/venv/bin/python" "$root/packaging/install_locked.py" run
        constraints=(--no-index --no-deps)
        isolation=--no-build-isolation
    fi
    if [ "$from" != source ]; then
        if [ "$from" = compiled ]; then unset CC CXX LD; fi
        "${pip[@]}" wheel --quiet --no-cache-dir --no-deps $isolation --wheel-dir "$scratch/dist" "$scratch/source"
        export CC=/bin/false CXX=/bin/false LD=/bin/false
        install=("${constraints[@]}" "$scratch"/dist/petalnode-*.whl)
    fi
fi

began=$SECONDS
"${pip[@]}" install --quiet --no-cache-dir "${install[@]}"
echo "installed from $from without a compiler in $((SECONDS - began)) s, $(du -sh "$scratch/venv" | cut -f1)"
cd "$scratch/home"
export HOME=$scratch/home XDG_DATA_HOME=$scratch/home/data XDG_CACHE_HOME=$scratch/home/cache
"${pip[@]}" check
"$scratch/venv/bin/petalnode" --version
kernels=$("$scratch/venv/bin/python" -c 'from petalnode.node.blocks.kernels.library import SHIPPED; print(SHIPPED.is_file())')
echo "compiled kernels are installed: $kernels"
if [ "$from" = compiled ] && [ "$kernels" != True ]; then exit 1; fi
if [[ $from = source || $from = wheel || $from = locked ]] && [ "$kernels" != False ]; then exit 1; fi
began=$SECONDS
"$scratch/venv/bin/petalnode" self-test --new-swarm --no-mdns --timeout 600
echo "self-test passed in $((SECONDS - began)) s"
