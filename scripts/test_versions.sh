#!/usr/bin/env bash
# Runs tests against other versions of megatron-core than the one in requirements.txt:
#     ./scripts/test_versions.sh                   the newest of 0.16, 0.17 and 0.18
#     ./scripts/test_versions.sh 0.17.0 0.19.1     these
#     ./scripts/test_versions.sh 0.17.0 -- tests/swap -k disk    pytest with these words instead
# For each, an environment is made at .venv-versions/VERSION (links to this repo's environment, and
# the 2 MB wheel; kept and used again), in which the layer's and swapping's own tests run; then
# tests/versions, which starts the launcher in it where the wheel holds megatron.training.
# About 10 minutes a version on two cores. Exit status 0 only if all is right with all of them.
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=scripts/lib/progress.sh
source "$root/scripts/lib/progress.sh"
# shellcheck source=scripts/lib/python.sh
source "$root/scripts/lib/python.sh"
# shellcheck source=scripts/lib/env.sh
source "$root/scripts/lib/env.sh"

# What needs megatron.core alone, so that it runs in every version.
tests=(tests/layer tests/swap tests/ops/test_norm.py tests/ops/test_flash_attention.py
    tests/ops/test_packed.py tests/platform)
versions=()
while (($#)); do
    case $1 in
        --)
            shift
            (($#)) && tests=("$@")
            break
            ;;
        -*)
            sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"
            [[ $1 == -h || $1 == --help ]] && exit 0
            exit 2
            ;;
        *) versions+=("$1") && shift ;;
    esac
done
((${#versions[@]})) || versions=(0.16.1 0.17.1 0.18.2)

memo_ensure_env "$root" || exit 1
cd "$root"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

summary="" failed=0
for version in "${versions[@]}"; do
    memo_say "megatron-core $version"
    status=0
    if python=$("$MEMO_VENV_PYTHON" scripts/lib/version_env.py "$version" ".venv-versions/$version")
    then
        PYTHONPATH=$root "$python" -m pytest --numprocesses 2 --dist loadfile "${tests[@]}" ||
            status=$?
        MEMO_TEST_VERSIONS=$version "$MEMO_VENV_PYTHON" -m pytest tests/versions || status=$?
    else
        status=1
    fi
    if ((status)); then
        failed=1
        summary+="${summary:+, }$version FAILED"
    else
        summary+="${summary:+, }$version ok"
    fi
done
echo "test_versions.sh: $summary"
exit "$failed"
