"""Modules of the documentation and of scripts/, for the tests of this folder."""

import sys

from tests.docs.commands import ROOT

sys.path[:0] = [str(ROOT / name) for name in ("scripts", "docs", "docs/_ext")]
