#!/usr/bin/env bash
# Makes .venv at the root of the repository, ready to train and test.
# shellcheck source=lib.sh
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

usage() {
    cat <<'TEXT'
Makes .venv at the root of the repository: Python 3.11 or 3.12, torch, Megatron-Core, SGLang and megatron_tim (editable).
A second call with nothing to do returns at once; an interrupted one is done again.

  launch/setup.sh          install what is missing
  launch/setup.sh --plan   print what would be installed, and install nothing

Environment: PYTHON=/path/to/python3.11 chooses the Python, MEGATRON_TIM_DEVICE=cpu|cuda overrides the detection of a GPU,
and pip's own settings (index, proxy, certificates, cache) are respected.
TEXT
}

REQUIREMENTS="$ROOT/launch/requirements"
STAMP="$VENV/.megatron-tim-setup" # first line: what the environment was made from; second line: our own packages in it
LOG="$VENV/setup.log"
GB_CPU=4 GB_CPU_WITH_CUDA_TORCH=9 GB_CUDA=25 # needed free, with some room for pip's downloads

main() {
    case "${1:-}" in
        "" | --plan) ;;
        -h | --help) usage; exit ;;
        *) fail "unknown argument $1; see --help." ;;
    esac
    # An outer Python's settings must not leak into this one.
    unset PYTHONHOME PYTHONPATH PIP_TARGET PIP_PREFIX PIP_USER PIP_REQUIREMENT
    export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
    cd "$ROOT"
    DEVICE="$(find_device)"
    if [ "${1:-}" = --plan ]; then find_python; print_plan; exit; fi
    exec 3>&1 # a step's own output goes to the log, also while this trap runs
    trap 'say " interrupted; run this again to finish" >&3; exit 130' INT
    lock
    find_python
    local environment packages
    environment="$(fingerprint_environment)"
    packages="$(fingerprint_packages)"
    if [ "$(sed -n 1p "$STAMP" 2>/dev/null)" != "$environment" ]; then
        make_environment
        install_packages
    elif [ "$(sed -n 2p "$STAMP")" != "$packages" ]; then
        install_packages
    else
        return 0
    fi
    printf '%s\n%s\n' "$environment" "$packages" >"$STAMP.new"
    mv "$STAMP.new" "$STAMP"
    say "ready: $VENV ($(du -sh "$VENV" | cut -f1)) in $SECONDS s"
}

# One set-up at a time; the lock goes when the process does.
lock() {
    exec 9<"$ROOT"
    flock -n 9 || { say "another set-up of this folder is running; waiting for it"; flock 9; }
}

requirement_files() {
    if [ "$DEVICE" = cuda ]; then printf '%s\n' bootstrap gpu gpu-build dev; else printf '%s\n' bootstrap torch cpu dev; fi
}

needed_gb() { if [ "$DEVICE" = cuda ]; then echo $GB_CUDA; else echo $GB_CPU; fi; }
free_gb() { df -Pk "$ROOT" | awk 'NR == 2 { print int($4 / 1024 / 1024) }'; }

print_plan() {
    say "python: $PYTHON_VERSION ($PYTHON_FOUND)"
    say "device: $DEVICE"
    say "environment: $VENV"
    say "requirements: $(requirement_files | sed 's|.*|launch/requirements/&.txt|' | paste -sd ' ')"
    say "sglang cpu shim: $([ "$DEVICE" = cpu ] && printf yes || printf no)"
    say "disk: $(needed_gb) GB$([ "$DEVICE" = cpu ] && printf ', %s GB if the package index has no CPU build of torch' $GB_CPU_WITH_CUDA_TORCH), $(free_gb) GB free"
}

hash() { sha256sum | cut -c1-32; }
fingerprint_environment() { printf '%s %s %s %s' "$PYTHON_VERSION" "$DEVICE" "$(cat "$REQUIREMENTS"/*.txt | hash)" "$ROOT"; }
fingerprint_packages() { find setup.py tools/sglang_cpu_shim -name '*.py' -exec sha256sum {} + | LC_ALL=C sort | hash; }

# Starts from nothing, so that an interrupted or outdated environment leaves no trace.
make_environment() {
    [ ! -e "$VENV" ] || [ -e "$STAMP" ] || fail "$VENV exists but was not made by this script; move it away."
    require_disk "$(needed_gb)" "this set-up"
    [ "$DEVICE" = cpu ] || require_nvcc
    if [ "${PYTHON_FOUND#"$VENV"/}" != "$PYTHON_FOUND" ]; then PYTHON_FOUND="$("$PYTHON_FOUND" -c 'import sys; print(sys._base_executable)')"; fi
    rm -rf "$VENV"
    mkdir "$VENV"
    say unfinished >"$STAMP"
    say "Python $PYTHON_VERSION, $DEVICE; details in ${LOG#"$ROOT"/}"
    stage "virtual environment" "$PYTHON_FOUND" -m venv "$VENV"
    stage "pip" pip_install -r "$REQUIREMENTS/bootstrap.txt"
    if [ "$DEVICE" = cuda ]; then install_cuda; else install_cpu; fi
    stage "byte code" compile_all
}

install_cpu() {
    stage "which build of torch" pip_install --dry-run --no-deps -r "$REQUIREMENTS/torch.txt"
    grep -q 'Would install torch-.*+cpu' "$LOG" ||
        require_disk $GB_CPU_WITH_CUDA_TORCH "the CUDA build of torch, the only one that the package index offers,"
    # torch's own requirements are resolved, for a CUDA build has many; cpu.txt says which version of what they share.
    stage "torch" pip_install -r "$REQUIREMENTS/torch.txt" -c "$REQUIREMENTS/cpu.txt"
    stage "Megatron-Core, SGLang and what they need" pip_install --no-deps -r "$REQUIREMENTS/cpu.txt" -r "$REQUIREMENTS/dev.txt"
}

require_nvcc() {
    command -v nvcc >/dev/null || [ -x "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc" ] ||
        fail "nvcc is not found, and transformer-engine is compiled with it; install the CUDA toolkit or set CUDA_HOME."
}

install_cuda() {
    stage "torch, Megatron-Core, SGLang and what they need" pip_install -r "$REQUIREMENTS/gpu.txt" -r "$REQUIREMENTS/dev.txt"
    stage "transformer-engine, compiled here (long)" pip_install --no-build-isolation -r "$REQUIREMENTS/gpu-build.txt"
}

install_packages() {
    if [ "$DEVICE" = cpu ]; then stage "SGLang CPU shim" install_shim; fi
    stage "megatron_tim" pip_install --no-deps --no-build-isolation -e "$ROOT"
}

# Built from a copy: a build folder left in the source would bring back removed files.
install_shim() {
    local source="$VENV/shim-source"
    rm -rf "$source" &&
        cp -r "$ROOT/tools/sglang_cpu_shim" "$source" &&
        pip_install --no-deps --no-build-isolation --force-reinstall "$source" &&
        rm -rf "$source"
}

# Without byte code: pip compiles on one core, compile_all on all of them.
pip_install() { "$VENV/bin/python" -m pip install --progress-bar off --no-compile "$@"; }

# Some packages ship files that are not meant for this Python, so a failure of one says nothing.
compile_all() { "$VENV/bin/python" -m compileall -q -j 0 -x '/(tests?|testing/_internal|multimodal_gen)/' "$VENV/lib" || true; }

require_disk() {
    [ "$(free_gb)" -ge "$1" ] || fail "$2 needs $1 GB of free disk at $ROOT, and $(free_gb) GB are free."
}

# Runs a step with its output in the log, and says how long it took or, in a sentence, why it failed.
stage() {
    local name="$1" start=$SECONDS
    shift
    printf '  %s ... ' "$name"
    printf '\n== %s\n' "$name" >>"$LOG"
    "$@" >>"$LOG" 2>&1 </dev/null || { say; fail "$name: $(why_failed); the output is in $LOG"; }
    say "$((SECONDS - start)) s"
}

why_failed() {
    local last
    last="$(sed '/^== /h;//!H;$!d;x' "$LOG")"
    case "$last" in
        *"No space left on device"* | *"Disk quota exceeded"*) printf 'the disk is full (pip unpacks in %s too)' "${TMPDIR:-/tmp}" ;;
        *"NewConnectionError"* | *"name resolution"* | *"ProxyError"* | *"ConnectTimeout"* | *"Network is unreachable"* | *"timed out"* | *"Connection broken"*)
            printf 'the package index cannot be reached; check the network and the settings of pip (pip config list), then run this again' ;;
        *"No matching distribution found for "*)
            printf 'the package index does not offer %s for Python %s on this system' "$(sed -n 's/.*No matching distribution found for \([^ ]*\).*/\1/p' <<<"$last" | head -1)" "$PYTHON_VERSION" ;;
        *) printf 'failed' ;;
    esac
}

main "$@"
