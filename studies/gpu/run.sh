#!/bin/sh
# Everything that needs a GPU, in parts of at most five minutes (README.md has them). From the repository's root:
#
#     sh studies/gpu/run.sh [first | second | third | fourth | fifth]
#     PYTHON=.venv/bin/python sh studies/gpu/run.sh check [--device cpu]
#
# `check` runs the same code in small before a GPU is asked for: on the simulated accelerator of the tests, which it builds into
# build/accelerator and which needs a C++ compiler, or on the CPU.
#
# What is measured is printed as it comes, a line that begins with RECORD each, and kept in $OUT, or in studies/gpu/results
# without it. Needs python3 with torch for CUDA, numpy, Pillow, pandas, psutil and pytest; of the rest, what is missing is taken
# from .whl (see wheels.sh), without a network. Nothing is installed outside a folder in /tmp. LIMIT_S: seconds of a part.
set -u
cd "$(dirname "$0")/../.."
begun=$(date +%s)
PYTHON=${PYTHON:-python3}
OUT=${OUT:-$PWD/studies/gpu/results}
LIMIT_S=${LIMIT_S:-300}
export OUT PYTHONUNBUFFERED=1
mkdir -p "$OUT"
if [ -d .whl ] && [ "${1:-all}" != check ]; then
    site=$(mktemp -d /tmp/autotune-loader-site.XXXXXX)
    "$PYTHON" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --target "$site" .whl/*.whl || exit 1
    PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"
fi
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
status=0

TESTS="tests/pipeline/test_prefetch.py tests/bursts/test_cuda.py tests/autoloader/test_elastic.py"

# within SECONDS: these, or those that are left of the part
within() {
    left=$((LIMIT_S - $(date +%s) + begun))
    echo $(($1 < left ? $1 : left))
}
# limited SECONDS LOG COMMAND...: what the command prints is shown and kept; it is ended then, or at the end of its part
limited() {
    seconds=$(within "$1") log=$2
    shift 2
    if [ "$seconds" -lt 5 ]; then echo "NO TIME LEFT: $*" && return; fi
    { timeout -k 10 "$seconds" "$PYTHON" -W ignore "$@" 2>&1 || echo "FAILED with $?: $*"; } | tee "$OUT/$log"
    ! grep -q "^FAILED" "$OUT/$log" || status=1
    echo "TOOK $(($(date +%s) - begun)) s so far"
}
# Each by name as it ends, should time be up; a warning of another torch is no failure.
tests() {
    limited 130 tests.txt -m pytest -o addopts=-v -o filterwarnings=default -m gpu -p no:cacheprovider -rs --durations=10 \
        $TESTS "$@"
}
# A bare interpreter starts in some seconds, and what runs last ends a little late.
study() { limited "$2" "$part-$1.txt" -m studies gpu.tuned --only "$1" --seconds $(($(within "$2") - 15)); }
uses() { name=$1 seconds=$2; shift 2; limited "$seconds" "$name.txt" -m studies gpu.uses --only "$name" "$@"; }
first() { tests; study resnet_jpeg 300; }
second() { study images 170; study transformer 130; }
third() { uses images 60; uses live 70; }
fourth() { uses watch 60; }
fifth() {
    limited 150 stations.txt -m studies gpu.stations --seconds 135
    study images 300
}
check() {
    export OMP_NUM_THREADS=1 # threads of a copy would wait for one another on a busy machine
    device=${3:-sim}
    if [ "$device" = sim ]; then
        PYTHONPATH="$("$PYTHON" -m tests.support.accelerator build/accelerator):$PYTHONPATH" || exit 1
    fi
    limited 60 stations.txt -m studies gpu.stations --device "$device" --quick
    limited 150 small.txt -m studies gpu.tuned --device "$device" --quick
    limited 150 uses.txt -m studies gpu.uses --device "$device" --quick
    tests --collect-only
}

part=${1:-all}
if [ "$part" != check ]; then
    "$PYTHON" -c 'import torch; print(torch.__version__, torch.cuda.get_device_name())' || exit 1
    uname -r && nproc && free -m && df -h /dev/shm /tmp
fi
case $part in
first | second | third | fourth | fifth | check) "$part" "$@" ;;
all) for part in first second third fourth fifth; do "$part"; begun=$(date +%s); done ;;
*) echo "$part is no part; first, second, third, fourth, fifth, check or all would work" >&2 && exit 2 ;;
esac
exit $status
