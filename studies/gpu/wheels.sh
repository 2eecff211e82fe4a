#!/bin/sh
# Downloads into .whl what a bare GPU machine with Python 3.12 and torch lacks. Run it where there is a package registry,
# from the repository's root; run.sh installs from there. Versions are those of constraints.txt.
set -eu
cd "$(dirname "$0")/../.."
names="optuna alembic colorlog sqlalchemy mako msgspec platformdirs"
pinned=$(for name in $names; do grep -i "^$name==" constraints.txt | sed "s/;.*//"; done)
exclude=$(git rev-parse --git-path info/exclude)
mkdir -p "$(dirname "$exclude")"
grep -qsx "/.whl/" "$exclude" || echo "/.whl/" >>"$exclude"
# shellcheck disable=SC2086 # one argument for each
"${PYTHON:-python3}" -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
    --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
    --platform manylinux1_x86_64 -d .whl $pinned
ls -l .whl
