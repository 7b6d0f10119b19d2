# shellcheck shell=bash
# What the scripts that start runs share. Sourced.
#
#   memo_python ROOT  prints the Python to start ranks with: $MEMO_PYTHON or the repo's environment
#   memo_environment  exports the variables below

memo_python() {
    local python=${MEMO_PYTHON:-$1/.venv/bin/python}
    if [[ ! -x $(command -v "$python") ]]; then
        echo "$python: no such Python. Make the environment with ./scripts/test.sh or" \
            "./scripts/quickstart.sh, or name another in MEMO_PYTHON." >&2
        return 1
    fi
    printf '%s\n' "$python"
}

# A variable that is set already keeps its value.
memo_environment() {
    # The loader's processes and memo's copies use the cores beside the ranks. Left to itself, each
    # rank would start a thread for every core of the node.
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
    # Lines are written as they come; otherwise the last ones of a run that is killed are lost.
    export PYTHONUNBUFFERED=${PYTHONUNBUFFERED:-1}
    # Names the link or rank when a collective fails; silent as long as none does.
    export NCCL_DEBUG=${NCCL_DEBUG:-WARN}
}
