#!/usr/bin/env python3
"""Text files to Megatron's indexed dataset; `prepare_data.py --help` lists the flags.

The work is done by the package, megatron_memo/data.
"""

import sys
from pathlib import Path

# So that it runs from a checkout that was not installed.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

try:
    from megatron_memo.data.cli import main
except KeyboardInterrupt:  # the imports take a moment, and nothing has been done yet
    sys.exit(130)

if __name__ == "__main__":
    sys.exit(main())
