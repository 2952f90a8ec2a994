#!/usr/bin/env bash
# From a fresh clone to a finished RL run of a tiny MoE model with SGLang and Megatron-Core on a CPU.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

MODEL=models/tiny-qwen3-moe
DATA=data/arithmetic
CONFIG=configs/tiny_cpu.yaml

usage() {
    cat <<TEXT
Trains a tiny Qwen3-MoE on arithmetic with both real engines on a CPU: sets the environment up, makes the model and
the problems where they are absent, and starts megatron-tim train --config $CONFIG.

  launch/quickstart.sh [key=value ...]
  launch/quickstart.sh run.steps=5 correction.method=tis

The run is runs/quickstart. Started again, an unfinished run goes on, and after a finished one the next is called
quickstart-2, and so on. run.name=NAME chooses another name. The keys are those of the configuration file.
TEXT
}

main() {
    local argument
    for argument in "$@"; do
        case "$argument" in
            -h | --help) usage; exit ;;
            [!-]*=*) ;;
            *) fail "$argument is not of the form key=value; see --help." ;;
        esac
    done
    "$ROOT/launch/setup.sh"
    cd "$ROOT"
    unset PYTHONPATH PYTHONHOME
    make_inputs
    # The given keys come last, so a run.name among them wins.
    exec "$VENV/bin/megatron-tim" train --config "$CONFIG" "run.name=$(next_run "$(value_of run.dir runs "$@")")" "$@"
}

# Both makers write a folder whole or not at all; the lock keeps a second quickstart from making the same one.
make_inputs() {
    (
        flock 9
        [ -e "$DATA" ] || "$VENV/bin/python" tools/make_arithmetic.py --out "$DATA"
        [ -e "$MODEL" ] || "$VENV/bin/python" tools/make_tiny_model.py --out "$MODEL" --data "$DATA/train.jsonl"
    ) 9<"$ROOT"
}

# The last value of key $1 among the arguments after $2, or $2.
value_of() {
    local key="$1" value="$2" argument
    shift 2
    for argument in "$@"; do
        [ "${argument%%=*}" != "$key" ] || value="${argument#*=}"
    done
    printf '%s' "$value"
}

# The first of quickstart, quickstart-2, ... in folder $1 that is not finished: one that was interrupted, or a new one.
next_run() {
    local name=quickstart number=1
    while [ -e "$1/$name/summary.json" ]; do
        number=$((number + 1))
        name="quickstart-$number"
    done
    printf '%s' "$name"
}

main "$@"
