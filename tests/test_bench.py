"""The benchmarks run, and what they measure against keeps its own rules."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parent / "bench"
sys.path.insert(0, str(BENCH))

from quick_sume import Heard, QuickSume, Rules  # noqa: E402  found by the path above


def post(sume: QuickSume, key: str) -> tuple[int, dict[str, object]]:
    return sume.answer(Heard("POST", "/v1/videos", key, False, 0))


def ran(script: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCH / script), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


def test_quick_sume_remembers_keys_and_keeps_its_queue() -> None:
    sume = QuickSume(Rules(job_s=None, capacity=2))
    first = post(sume, "a")
    assert first[0] == 202
    assert post(sume, "a") == (200, {"job_id": first[1]["job_id"], "idempotency_hit": True})
    assert post(sume, "b")[1]["generation_limits"] == {"queue_capacity_remaining": 0}
    code, told = post(sume, "c")
    assert (code, told["error"]) == (
        429,
        {"code": "queue_full", "message": "wait for a job to end"},
    )
    assert (len(sume.jobs), sume.books.queue_full) == (2, 1)


def test_quick_sume_refuses_what_is_over_its_limit_in_any_ten_seconds() -> None:
    sume = QuickSume(Rules(writes_per_minute=12))
    assert [post(sume, key)[0] for key in "abc"] == [202, 202, 429]
    assert sume.books.rate_limited == 1


@pytest.mark.skipif(os.name != "posix", reason="counts by wait4, kills by SIGKILL")
def test_a_bench_and_the_growth_run() -> None:
    bench = ran("bench.py", "commits")
    assert bench.returncode == 0, bench.stderr
    assert "| commits, 500 jobs (baseline: facts) |" in bench.stdout
    growth = ran("scale.py", "200")
    assert growth.returncode == 0, growth.stderr
    assert growth.stdout.splitlines()[2].startswith("| 200 | ")


def test_bench_that_is_not_there() -> None:
    bench = ran("bench.py", "nothing")
    assert bench.returncode == 2
    assert "no bench 'nothing'; there are: start_up, " in bench.stderr
