# shellcheck shell=bash
# What the batch scripts share. Sourced; Slurm runs a copy of a batch script from elsewhere, so they
# find this by the folder that they were submitted from.
#
#   memo_python      the Python to start ranks with: $MEMO_PYTHON or the repo's environment
#   memo_settings    exports the variables below
#   memo_run_folder  prints the job's folder for checkpoints, plans and reports; makes it

memo_python() {
    local python=${MEMO_PYTHON:-$PWD/.venv/bin/python}
    if [[ ! -x $(command -v "$python") ]]; then
        echo "$python: no such Python. Make the environment with ./scripts/test.sh or" \
            "./scripts/quickstart.sh, or name another: sbatch --export=ALL,MEMO_PYTHON=... " >&2
        return 1
    fi
    printf '%s\n' "$python"
}

# A variable that is set already keeps its value: sbatch --export=ALL,NAME=value.
memo_settings() {
    # The loader's processes and memo's copies use the cores beside the ranks. Left to itself, each
    # rank would start a thread for every core of the node.
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
    # Lines are written as they come; otherwise the last ones of a job that is killed are lost.
    export PYTHONUNBUFFERED=1
    # Names the link or rank when a collective fails; silent as long as none does.
    export NCCL_DEBUG=${NCCL_DEBUG:-WARN}
    # A batch script runs on the first node of its job, and so does rank 0.
    MASTER_ADDR=${MASTER_ADDR:-$(hostname)}
    # Jobs that share a node must not meet at one port.
    MASTER_PORT=${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 20000))}
    export MASTER_ADDR MASTER_PORT
}

# A job that is requeued keeps its number, and so its folder: that is how it finds its checkpoint.
memo_run_folder() {
    local folder=${MEMO_RUN:-$PWD/runs/$SLURM_JOB_NAME-$SLURM_JOB_ID}
    mkdir -p "$folder" && printf '%s\n' "$folder"
}
