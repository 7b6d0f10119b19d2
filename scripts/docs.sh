#!/usr/bin/env bash
# Builds the documentation into docs/_build/html. A warning, such as a reference that leads nowhere,
# is an error. Arguments go to sphinx-build:
#     ./scripts/docs.sh        what has changed
#     ./scripts/docs.sh -E     everything anew
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=scripts/lib/progress.sh
source "$root/scripts/lib/progress.sh"
# shellcheck source=scripts/lib/python.sh
source "$root/scripts/lib/python.sh"
# shellcheck source=scripts/lib/env.sh
source "$root/scripts/lib/env.sh"

memo_ensure_env "$root"
"$MEMO_VENV_PYTHON" -m sphinx -W --keep-going -n -b html "$@" "$root/docs" "$root/docs/_build/html"
echo "docs.sh: open $root/docs/_build/html/index.html"
