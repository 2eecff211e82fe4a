#!/bin/sh
# Everything that needs a GPU, in parts of less than 8 minutes, most valuable first. From the repository's root:
#
#     sh studies/gpu/run.sh              # all of them, about half an hour
#     sh studies/gpu/run.sh first        # the tests marked gpu, then resnet_jpeg
#     sh studies/gpu/run.sh second       # transformer, large_batches
#     sh studies/gpu/run.sh third        # resnet_compute, Lightning and the HF Trainer
#     sh studies/gpu/run.sh check        # on a CPU: the same code in small, as far as it goes without CUDA
#
# What is measured is printed as it comes, a line that begins with RECORD each, and kept in $OUT, or in studies/gpu/results
# without it. Needs python3 with torch for CUDA, numpy and Pillow; of the rest, what is missing is taken from .whl (see wheels.sh),
# without a network. Nothing is installed outside a folder in /tmp.
set -u
cd "$(dirname "$0")/../.."
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

# limited SECONDS LOG COMMAND...: what the command prints is shown and kept; what takes longer is ended
limited() {
    seconds=$1 log=$2
    shift 2
    { timeout "$seconds" "$PYTHON" "$@" 2>&1 || echo "FAILED with $?: $*"; } | tee "$OUT/$log"
    ! grep -q "^FAILED with" "$OUT/$log" || status=1
}
tests() {
    limited 200 gpu-tests.txt -m pytest -o addopts=-q -m gpu -p no:cacheprovider -rs --durations=10 \
        tests/pipeline/test_prefetch.py tests/probe/test_cuda.py
}
study_of() { limited "$1" "$2.txt" -W ignore -m studies.gpu --only "$2" --out "$OUT/$2"; }
frameworks() { limited 200 frameworks.txt -W ignore -m studies.frameworks --device cuda --only Lightning,"HF Trainer" --out "$OUT/frameworks.md"; }
check() {
    limited 400 check.txt -W ignore -m studies.gpu --device cpu --quick --out "$OUT/check"
    limited 60 check-tests.txt -m pytest -o addopts=-q -m gpu -p no:cacheprovider --collect-only -q \
        tests/pipeline/test_prefetch.py tests/probe/test_cuda.py
}

part=${1:-all}
if [ "$part" != check ]; then
    "$PYTHON" -c 'import torch; print(torch.__version__, torch.cuda.get_device_name())' || exit 1
fi
case $part in
first) tests && study_of 270 resnet_jpeg ;;
second) study_of 235 transformer && study_of 235 large_batches ;;
third) study_of 270 resnet_compute && frameworks ;;
all) tests && study_of 270 resnet_jpeg && study_of 235 transformer && study_of 235 large_batches && study_of 270 resnet_compute && frameworks ;;
tests | frameworks | check) "$part" ;;
*) echo "$part is no part; first, second, third, tests, frameworks, check or all would work" >&2 && exit 2 ;;
esac
exit $status
