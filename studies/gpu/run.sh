#!/bin/sh
# Everything that needs a GPU, in one command: the tests marked gpu, then the studies. From the repository's root:
#
#     sh studies/gpu/run.sh              # both
#     sh studies/gpu/run.sh tests        # one
#     sh studies/gpu/run.sh study --only transformer
#
# Results go to $OUT, or to studies/gpu/results without it. Needs python3 with torch for CUDA, numpy and Pillow; of the rest,
# what is missing is taken from .whl (see wheels.sh), without a network. Nothing is installed outside a folder in /tmp.
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
part=${1:-all}
[ $# -gt 0 ] && shift
"$PYTHON" -c 'import torch; print(torch.__version__, torch.cuda.get_device_name())' || exit 1
status=0
if [ "$part" != study ]; then
    timeout 300 "$PYTHON" -m pytest -o addopts=-q -m gpu -p no:cacheprovider -rs --durations=10 tests/pipeline/test_prefetch.py tests/probe/test_cuda.py tests/probe/test_acceleration.py \
        >"$OUT/gpu-tests.txt" 2>&1 || status=$?
    tail -n 25 "$OUT/gpu-tests.txt"
fi
if [ "$part" != tests ]; then
    "$PYTHON" -W ignore -m studies.gpu "$@" || status=$?
fi
exit $status
