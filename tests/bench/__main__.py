"""`python -m tests.bench`: measure, print, and exit 1 on a missed bar."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

import torch

from tests.bench import eightbit, host, optim, padding, peak, sharded_optim, step, traffic
from tests.bench.table import as_json, print_table

# A section has a TITLE, `measure(num_launches)` and `rows(samples)`.
SECTIONS = {
    "step": step,
    "host": host,
    "optim": optim,
    "sharded-optim": sharded_optim,
    "eightbit": eightbit,
    "peak": peak,
    "traffic": traffic,
    "padding": padding,
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="sections to run")
    parser.add_argument("--quick", action="store_true", help="one launch instead of the median of five")
    parser.add_argument("--json", type=Path, help="write the rows to this file too")
    args = parser.parse_args()
    setting = {
        "torch": torch.__version__,
        "num_cpus": os.cpu_count(),
        "num_launches": 1 if args.quick else 5,
    }
    print("gloo on CPU, medians of interleaved launches:", setting)
    rows = {}
    for name in args.only:
        start = time.perf_counter()
        rows[name] = SECTIONS[name].rows(SECTIONS[name].measure(setting["num_launches"]))
        print_table(f"{SECTIONS[name].TITLE} ({time.perf_counter() - start:.0f} s)", rows[name])
    if args.json:
        tables = {name: as_json(table) for name, table in rows.items()}
        args.json.write_text(json.dumps({"setting": setting, "rows": tables}, indent=1))
    num_misses = sum(row.met is False for table in rows.values() for row in table)
    print(f"\n{num_misses} bars missed" if num_misses else "\nall bars met")
    return 1 if num_misses else 0


if __name__ == "__main__":
    sys.exit(main())
