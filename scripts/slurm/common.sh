# shellcheck shell=bash
# What the batch scripts share. Sourced; Slurm runs a copy of a batch script from elsewhere, so they
# find this by the folder that they were submitted from.
#
#   memo_python ROOT see scripts/lib/run.sh; sbatch --export=ALL,MEMO_PYTHON=... names another
#   memo_settings    exports the variables of scripts/lib/run.sh, and where the ranks meet
#   memo_run_folder  prints the job's folder for checkpoints, plans and reports; makes it

# shellcheck source=scripts/lib/run.sh
source scripts/lib/run.sh

# A variable that is set already keeps its value: sbatch --export=ALL,NAME=value.
memo_settings() {
    memo_environment
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
