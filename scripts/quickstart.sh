#!/usr/bin/env bash
# Makes the environment, then trains a small GPT with memo on this machine and compares memo with
# stock Megatron. `--help` lists what can be changed; flags of Megatron can be given as well.
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=scripts/lib/progress.sh
source "$root/scripts/lib/progress.sh"
# shellcheck source=scripts/lib/python.sh
source "$root/scripts/lib/python.sh"
# shellcheck source=scripts/lib/env.sh
source "$root/scripts/lib/env.sh"

if ! memo_ensure_env "$root"; then
    echo "quickstart.sh: no environment, nothing was trained" >&2
    exit 1
fi
cd "$root"
# Part of the time to the first iteration, which the program tells.
export MEMO_INSTALL_SECONDS=$SECONDS
exec "$MEMO_VENV_PYTHON" scripts/quickstart.py "$@"
