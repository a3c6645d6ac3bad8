#!/usr/bin/env bash
# Makes a release in dist/VERSION: source distribution, wheel, and SHA256SUMS; tags the commit as vVERSION.
#
#   packaging/release.sh VERSION
#
# Before: set the version in pyproject.toml and node/version.py, and give CHANGELOG.md its section; commit; `make check`.
# Nothing is uploaded and nothing is pushed.
set -euo pipefail
cd "$(dirname "$0")/.."
version=${1:?the version, such as 0.2.0}
refuse() {
    echo "release: $1" >&2
    exit 2
}
[[ $version =~ ^[0-9]+\.[0-9]+\.[0-9]+((a|b|rc)[0-9]+)?$ ]] || refuse "$version is no version such as 0.2.0 or 0.2.0rc1"
grep -qxF "version = \"$version\"" pyproject.toml || refuse "pyproject.toml has another version"
grep -qxF "__version__ = \"$version\"" node/version.py || refuse "node/version.py has another version"
grep -qF "## [$version]" CHANGELOG.md || refuse "CHANGELOG.md has no section ## [$version]"
[ -z "$(git status --porcelain)" ] || refuse "there are changes that are not committed"
! git rev-parse -q --verify "refs/tags/v$version" >/dev/null || refuse "the tag v$version exists"

make setup check-wheels
python=$PWD/.venv/bin/python
out=$PWD/dist/$version
rm -rf "$out" && mkdir -p "$out"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
# From what is committed, and the wheel from the source distribution: so that others can build it from that.
git archive HEAD | tar -x -C "$scratch"
export CC=/bin/false CXX=/bin/false
(cd "$scratch" && PYTHONPATH=packaging "$python" -c "import sys, build_backend; build_backend.build_sdist(sys.argv[1])" "$out") >"$scratch/sdist.log" 2>&1 ||
    { cat "$scratch/sdist.log" >&2; exit 1; }
# What builds it is in .venv, by its hashes.
"$python" -W ignore -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir "$out" "$out/petalnode-$version.tar.gz"
(cd "$out" && sha256sum ./*.tar.gz ./*.whl >SHA256SUMS)
packaging/clean_install.sh locked
git tag -a "v$version" -m "petalnode $version"
ls -l "$out"
echo "tagged v$version; to publish: git push origin v$version, and upload dist/$version"
