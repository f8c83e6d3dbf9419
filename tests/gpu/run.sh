#!/usr/bin/env bash
# Checks and times the Triton kernels on one GPU, in a few minutes. Needs Python with torch, triton and pytest; no
# installed Octavo, no Ray. Run from anywhere: tests/gpu/run.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export PYTHONPATH="$PWD/.ci/types" PYTHONUNBUFFERED=1
python=${PYTHON:-python3}

"$python" -c 'import torch, triton; print(torch.cuda.get_device_name(), "torch", torch.__version__, "triton", triton.__version__)'
"$python" -P tests/gpu/check_kernels.py
# The tests of tests/kernels alone: those above them need all of Octavo.
"$python" -P -m pytest -q -p no:cacheprovider --confcutdir=tests/kernels -k "triton and not test_triton" tests/kernels
for dtype in bfloat16 float32; do
    "$python" -P tests/bench/kernels.py --device cuda --dtype "$dtype"
done
