# shellcheck shell=bash disable=SC2034
# Shared by the scripts in this folder: where things are, messages, and the choice of Python and device.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="$ROOT/.venv"

say() { printf '%s\n' "$*"; }

fail() {
    printf '%s: error: %s\n' "$(basename "$0")" "$*" >&2
    exit 1
}

# Prints "3.11" when $1 runs, is 3.11 or 3.12, and can make virtual environments; otherwise says why not and fails.
python_version() {
    local probe='
import sys
print("%d.%d" % sys.version_info[:2])
if not (3, 11) <= sys.version_info[:2] <= (3, 12): sys.exit(3)
import ensurepip, venv'
    local version status=0
    version="$("$1" -c "$probe" 2>/dev/null </dev/null)" || status=$?
    case $status in
        0) printf '%s' "$version" ;;
        3) printf 'is %s' "$version"; return 1 ;;
        *) [ -n "$version" ] && printf 'is %s without the venv module' "$version" || printf 'does not run'; return 1 ;;
    esac
}

# Sets PYTHON_FOUND and PYTHON_VERSION: $PYTHON if set, otherwise the environment's own, otherwise the first that fits.
find_python() {
    local candidate path answer found=""
    if [ -z "${PYTHON:-}" ] && PYTHON_VERSION="$(python_version "$VENV/bin/python")"; then
        PYTHON_FOUND="$VENV/bin/python"
        return
    fi
    for candidate in ${PYTHON:-python3.11 python3.12 python3 python}; do
        path="$(path_outside_venv "$candidate")" || continue
        if answer="$(python_version "$path")"; then
            PYTHON_FOUND="$path" PYTHON_VERSION="$answer"
            return
        fi
        found="$found${found:+, }$path $answer"
    done
    [ -z "${PYTHON:-}" ] || fail "PYTHON=$PYTHON does not fit (${found:-not found}); it must be Python 3.11 or 3.12 with the venv module."
    fail "no Python 3.11 or 3.12 with the venv module (${found:-none found}); install one, or name it: PYTHON=/path/to/python3.11 $0"
}

# The first command called $1 that is not in the environment that may be about to be replaced.
path_outside_venv() {
    local path
    while read -r path; do
        [ "${path#"$VENV"/}" != "$path" ] || { printf '%s' "$path"; return; }
    done < <(type -ap "$1")
    return 1
}

# Prints cpu or cuda: $MEGATRON_TIM_DEVICE, or what the machine has.
find_device() {
    case "${MEGATRON_TIM_DEVICE:-}" in
        cpu | cuda) printf '%s' "$MEGATRON_TIM_DEVICE" ;;
        "") if [ -e /dev/nvidia0 ] || nvidia-smi -L 2>/dev/null | grep -q '^GPU '; then printf cuda; else printf cpu; fi ;;
        *) fail "MEGATRON_TIM_DEVICE=$MEGATRON_TIM_DEVICE is not a device; it must be cpu or cuda, or unset to detect." ;;
    esac
}
