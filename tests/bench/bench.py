"""Measures what the tool promises about speed, each figure beside a baseline of the same run.

    python tests/bench/bench.py            all lines; takes some minutes
    python tests/bench/bench.py add reads  those lines

Times are medians of several runs, taken in turn with their baselines; what is paced by a clock
is one run. Machines differ and are noisy: the ratios are what counts. Ledgers lie in $BENCH_DIR,
or where temporary files do, which should be a disk. The exit code is 0 if every line is met.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import offline
import online
import workers
from common import Line, end_in_order

BENCHES: dict[str, Callable[[Path], Iterator[Line]]] = {
    "start_up": offline.start_up,
    "restart": online.restart,
    "throughput": online.throughput,
    "budget": online.budget,
    "queue": online.queue,
    "reads": online.reads,
    "add": offline.add,
    "totals": offline.totals,
    "memory": online.memory,
    "commits": online.commits,
    "display": online.display,
    "workers": workers.four,
}


def main(names: list[str]) -> int:
    unknown = [name for name in names if name not in BENCHES]
    if unknown:
        print(f"no bench '{unknown[0]}'; there are: {', '.join(BENCHES)}", file=sys.stderr)
        return 2
    missed = 0
    end_in_order()
    print("| what | measured | baseline | ratio | goal | |\n|---|---|---|---|---|---|")
    for name in names or BENCHES:
        where = os.environ.get("BENCH_DIR")
        with tempfile.TemporaryDirectory(prefix="sume-bench-", dir=where) as folder:
            for line in BENCHES[name](Path(folder)):
                missed += not line.met
                verdict = "met" if line.met else "missed"
                cells = (line.what, line.measured, line.baseline, line.ratio, line.goal, verdict)
                print("|", " | ".join(cells), "|", flush=True)
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
