#!/bin/sh
# Downloads into .whl, which git ignores, what a bare GPU machine with Python 3.12, torch and pytest lacks. Run it where there
# is a package registry, from the repository's root; run.sh installs from there. Versions are those of constraints.txt.
set -eu
cd "$(dirname "$0")/../.."
names="optuna alembic colorlog sqlalchemy mako tqdm pyyaml packaging platformdirs cloudpickle click nvidia-ml-py
    rich markdown-it-py mdurl pygments"
pinned=$(for name in $names; do grep -i "^$name==" constraints.txt | sed "s/;.*//"; done)
# shellcheck disable=SC2086 # one argument for each
"${PYTHON:-python3}" -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
    --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
    --platform manylinux1_x86_64 -d .whl $pinned
ls -l .whl
