#!/usr/bin/env bash
# Sets the environment up and runs the tests; arguments go to pytest: launch/test.sh tests/correction -k cis
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

"$ROOT/launch/setup.sh"
cd "$ROOT"
unset PYTHONPATH PYTHONHOME
# One thread a process: the tests start several, and Megatron and SGLang each would take all cores. No model hub is asked.
export OMP_NUM_THREADS=1 TORCHDYNAMO_DISABLE=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
exec "$VENV/bin/python" -m pytest "$@"
