#!/bin/sh
# Everything that needs a GPU, in parts of less than 8 minutes, most valuable first. From the repository's root:
#
#     sh studies/gpu/run.sh              # all of them, about 20 minutes
#     sh studies/gpu/run.sh first        # resnet_jpeg: tune() and the grid; then the tests marked gpu
#     sh studies/gpu/run.sh second       # AutoLoader, watch, compare()
#     sh studies/gpu/run.sh third        # transformer, large_batches
#     sh studies/gpu/run.sh check        # on a CPU: the same code in small, as far as it goes without CUDA
#
# What is measured is printed as it comes, a line that begins with RECORD each, and kept in $OUT, or in studies/gpu/results
# without it. Needs python3 with torch for CUDA, numpy, Pillow, pandas, psutil and pytest; of the rest, what is missing is taken
# from .whl (see wheels.sh), without a network. Nothing is installed outside a folder in /tmp.
set -u
cd "$(dirname "$0")/../.."
begun=$(date +%s)
PYTHON=${PYTHON:-python3}
OUT=${OUT:-$PWD/studies/gpu/results}
export OUT PYTHONUNBUFFERED=1
mkdir -p "$OUT"
if [ -d .whl ]; then
    site=$(mktemp -d /tmp/autotune-loader-site.XXXXXX)
    "$PYTHON" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --target "$site" .whl/*.whl || exit 1
    PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"
fi
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
status=0

TESTS="tests/pipeline/test_prefetch.py tests/bursts/test_cuda.py"

# left: seconds of this part that are left; what is ended has 10 more
left() { echo $((450 - $(date +%s) + begun)); }

# limited SECONDS LOG COMMAND...: what the command prints is shown and kept; what takes longer is ended
limited() {
    seconds=$1 log=$2
    shift 2
    { timeout -k 10 "$seconds" "$PYTHON" -W ignore "$@" 2>&1 || echo "FAILED with $?: $*"; } | tee "$OUT/$log"
    ! grep -q "^FAILED" "$OUT/$log" || status=1
}
# Each by name as it ends, should time be up; a warning of another torch is no failure.
tests() {
    limited 200 tests.txt -m pytest -o addopts=-v -o filterwarnings=default -m gpu -p no:cacheprovider -rs --durations=10 \
        $TESTS "$@"
}
study() { limited "${2:-$(left)}" "$1.txt" -m studies.gpu --only "$1"; }
uses() { limited "$(left)" uses.txt -m studies.gpu.uses "$@"; }
first() { study resnet_jpeg 250; tests; }
second() { uses; }
third() { study transformer 225; study large_batches; }
check() {
    limited 300 check.txt -m studies.gpu --device cpu --quick
    begun=$(date +%s)
    uses --device cpu --quick
    tests --collect-only
}

part=${1:-all}
if [ "$part" != check ]; then
    "$PYTHON" -c 'import torch; print(torch.__version__, torch.cuda.get_device_name())' || exit 1
fi
case $part in
first | second | third | check) "$part" ;;
all) for each in first second third; do "$each"; begun=$(date +%s); done ;;
*) echo "$part is no part; first, second, third, check or all would work" >&2 && exit 2 ;;
esac
exit $status
