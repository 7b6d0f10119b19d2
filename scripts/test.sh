#!/usr/bin/env bash
# Makes the environment, then runs the checks and the tests. Arguments go to pytest:
#     ./scripts/test.sh                            everything
#     ./scripts/test.sh tests/layer -k exactness   some of it
# Exit status 0 only if lint, types and tests are all right.
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=scripts/lib/progress.sh
source "$root/scripts/lib/progress.sh"
# shellcheck source=scripts/lib/python.sh
source "$root/scripts/lib/python.sh"
# shellcheck source=scripts/lib/env.sh
source "$root/scripts/lib/env.sh"

if ! memo_ensure_env "$root"; then
    echo "test.sh: no environment, nothing was tested"
    exit 1
fi
cd "$root"
# Two ranks with one thread each fill two cores; more threads a rank only wait for each other.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

# All three run even if one fails: one round then shows everything there is to fix.
summary="" failed=0
check() {
    local name=$1 status=0
    shift
    memo_say "$name"
    "$@" || status=$?
    if ((status)); then
        failed=1
        summary+="${summary:+, }$name FAILED (status $status)"
    else
        summary+="${summary:+, }$name ok"
    fi
}
check ruff "$MEMO_VENV_PYTHON" -m ruff check .
check mypy "$MEMO_VENV_PYTHON" -m mypy
# Two processes; a file's tests stay in one, as they share fixtures that start training runs. Files
# keep the order of tests/conftest.py, where xdist would begin with those of most tests.
check pytest "$MEMO_VENV_PYTHON" -m pytest --numprocesses 2 --dist loadfile \
    --no-loadscope-reorder "$@"

if ((failed)); then
    echo "test.sh: failed after $((SECONDS / 60)) min $((SECONDS % 60)) s: $summary"
    exit 1
fi
echo "test.sh: all right after $((SECONDS / 60)) min $((SECONDS % 60)) s: $summary"
