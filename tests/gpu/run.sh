#!/usr/bin/env bash
# Checks and times the kernels and the engine on one GPU, in under 8 minutes; the last line is JSON. Needs Python with
# torch, triton, numpy and safetensors (pytest and hypothesis for the last part); no installed Octavo, no Ray. Run from
# anywhere: tests/gpu/run.sh [--device cpu] [--tiny] [--seconds N]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export PYTHONUNBUFFERED=1 PYTHONPATH=
python=${PYTHON:-python3}

"$python" -c 'import torch, triton; cuda = torch.cuda.is_available(); print(torch.cuda.get_device_name() if cuda else "no GPU", "torch", torch.__version__, "triton", triton.__version__)'
exec "$python" tests/gpu/run.py "$@"
