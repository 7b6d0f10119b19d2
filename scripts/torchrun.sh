#!/usr/bin/env bash
# Trains a config with torchrun, where there is no Slurm. What follows CONFIG goes to
# scripts/train.py. On one node:
#     ./scripts/torchrun.sh configs/gpt-7b-1m.yaml --data-path data/mine
# On several, the same on each of them, HOST being one of them:
#     ./scripts/torchrun.sh configs/gpt-13b-1m.yaml --rdzv HOST:29500 --data-path data/mine
# Checkpoints and memory plans go to $MEMO_RUN, runs/CONFIG if it is not set, which all nodes have
# to see; a run that is started again goes on from the last checkpoint there.
# scripts/kubernetes/job.yaml starts this in pods.
set -euo pipefail

config=${1:?usage: scripts/torchrun.sh CONFIG [--rdzv HOST:PORT] [flags]}
shift
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=scripts/lib/run.sh
source "$root/scripts/lib/run.sh"
python=$(memo_python "$root")
name=$(basename -- "$config")
run=${MEMO_RUN:-$PWD/runs/${name%.*}}
mkdir -p -- "$run"
memo_environment
exec "$python" "$root/scripts/train.py" "$config" --save "$run" --load "$run" \
    --save-interval 100 "$@"
