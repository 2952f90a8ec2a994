#!/usr/bin/env bash
# Mutation score of a part of the package: small faults are put into its functions, and its tests must notice.
#
#   tools/mutation.sh                                                            # megatron_tim/correction
#   tools/mutation.sh megatron_tim/megatron/logprobs.py tests/megatron/test_logprobs.py
#
# Works on a copy in build/mutation, prints the survivors and the score, and fails below MIN_SCORE percent.
# Needs mutmut (pip install mutmut==3.8.1). JOBS mutants run at a time, 2 unless set.
set -euo pipefail
cd "$(dirname "$0")/.."

sources=${1:-megatron_tim/correction}
tests=${2:-tests/correction}
min_score=${MIN_SCORE:-85}
for path in "$sources" "$tests"; do
    [[ -e $path ]] || { echo "tools/mutation.sh: $path does not exist; give a source and its tests, from the repository's root." >&2; exit 2; }
done
command -v mutmut >/dev/null || { echo "tools/mutation.sh: mutmut is not installed; pip install mutmut==3.8.1." >&2; exit 2; }
[[ -d $sources ]] && pattern="$sources/*" || pattern=$sources

work=build/mutation
rm -rf "$work"
mkdir -p "$work"
cp -r megatron_tim tests "$work/"
cd "$work"
# The copy has a pytest configuration of its own: the repository's would put the unchanged package first on the path.
cat > pyproject.toml <<CFG
[tool.mutmut]
source_paths = ["megatron_tim"]
only_mutate = ["$pattern"]
process_isolation = "forkserver"
pytest_add_cli_args = ["-p", "tests.without_shrinking"]
pytest_add_cli_args_test_selection = ["$tests"]

[tool.pytest.ini_options]
pythonpath = ["."]
addopts = "--import-mode=importlib"
CFG

# A mutant is dead at the first counterexample; hypothesis would go on for minutes to find the smallest.
cat > tests/without_shrinking.py <<'PLUGIN'
from hypothesis import Phase, settings

settings.register_profile("mutation", phases=[Phase.explicit, Phase.generate], database=None)
settings.load_profile("mutation")
PLUGIN

# Workers are forked, from a process that has run no test: threads of torch, gloo and OpenMP do not survive a fork.
export OMP_NUM_THREADS=1 PYTHONPATH=
mutmut run --max-children "${JOBS:-2}" > mutmut.log 2>&1 || { tr '\r' '\n' < mutmut.log | tail -40 >&2; exit 1; }
mutmut results
mutmut export-cicd-stats > /dev/null
python - "$min_score" <<'PY'
import json
import sys

stats = json.load(open("mutants/mutmut-cicd-stats.json"))
noticed, total = stats["killed"] + stats["timeout"] + stats["segfault"], stats["total"] - stats["skipped"]
score = 100 * noticed / total if total else 0.0
print(f"{noticed} of {total} mutants noticed: {score:.1f} % (at least {sys.argv[1]} wanted)")
sys.exit(score < float(sys.argv[1]))
PY
