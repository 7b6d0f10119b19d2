"""benchmarks/results/paper.csv is what benchmarks/paper.py says."""

import csv
from pathlib import Path

from benchmarks import paper as table

COMMITTED = Path(table.__file__).parent / "results" / "paper.csv"


def test_the_committed_table_is_what_the_estimate_says_today():
    with COMMITTED.open() as file:
        committed = list(csv.reader(line for line in file if not line.startswith("#")))
    computed = [list(table.COLUMNS), *(row.cells() for row in table.rows())]
    assert committed == computed, (
        "the estimate has changed: python benchmarks/paper.py --csv benchmarks/results/paper.csv"
    )
    misses = [row for row in computed if row[5] == "NO"]
    assert all(row[6] for row in misses), "a miss stays in the table with its reason"
