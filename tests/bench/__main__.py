"""`python -m tests.bench`: measure, print, and exit 1 on a missed bar."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch

from tests.bench import host, step
from tests.bench.table import as_json, print_table

SECTIONS = {"step": step, "host": host}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="sections to run")
    parser.add_argument("--quick", action="store_true", help="one launch instead of the median of five")
    parser.add_argument("--json", type=Path, help="write the rows to this file too")
    args = parser.parse_args()
    num_launches = 1 if args.quick else 5
    print(f"torch {torch.__version__}, gloo on CPU, median of {num_launches} interleaved launches")
    results = {}
    for name in args.only:
        start = time.perf_counter()
        results[name] = SECTIONS[name].rows(SECTIONS[name].measure(num_launches))
        print_table(f"{SECTIONS[name].TITLE} ({time.perf_counter() - start:.0f} s)", results[name])
    if args.json:
        args.json.write_text(json.dumps({name: as_json(rows) for name, rows in results.items()}, indent=1))
    misses = [row for rows in results.values() for row in rows if row.met is False]
    print(f"\n{len(misses)} bars missed" if misses else "\nall bars met")
    return 1 if misses else 0


if __name__ == "__main__":
    sys.exit(main())
