"""Runs the command in a process that can be told to die at a recording method or API call.

A point reads `record_accepted:after:2`: after the second call of that method returned. The
process dies by SIGKILL, so nothing of it is cleaned up. As a server (no arguments) it reads
one JSON order a line and forks a child for each, which saves the imports.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any, NoReturn

import httpx  # noqa: F401  imported once, before the forks
import rich.live  # noqa: F401

import sume_resume

API_CALLS = ("submit", "read", "result")
# What is done to the part of a result file, in this order.
PART_STEPS = ("keep", "write", "sync", "publish")


def recording_methods() -> list[str]:
    """Every method that records a fact, and the commit that makes them durable."""
    found = [name for name in vars(sume_resume.Ledger) if name.startswith("record_")]
    return [*found, "_commit"]


def die() -> NoReturn:
    if hasattr(signal, "SIGKILL"):
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(137)


def mined(base: type, names: tuple[str, ...] | list[str], point: str) -> type:
    """Return a subclass that dies before or after the nth call of the named method."""
    wanted, when, nth = point.split(":")
    calls: Counter[str] = Counter()

    def mine(name: str) -> Callable[..., Any]:
        original = getattr(base, name)

        @functools.wraps(original)
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            hit = name == wanted and calls[name] == int(nth)
            if hit and when == "before":
                die()
            result = original(self, *args, **kwargs)
            if hit:
                die()
            return result

        return method

    return type(base.__name__, (base,), {name: mine(name) for name in names if name == wanted})


def work(order: dict[str, Any]) -> NoReturn:
    """Be the command: with this point, these arguments, this environment."""
    os.environ.update(order.get("env", {}))
    os.chdir(order["folder"])
    with open(order["log"], "a") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    for name, value in order.get("constants", {}).items():
        setattr(sume_resume, name, value)
    point = order.get("point")
    if point:
        sume_resume.Ledger = mined(sume_resume.Ledger, recording_methods(), point)  # type: ignore[assignment,misc]
        sume_resume.Sume = mined(sume_resume.Sume, API_CALLS, point)  # type: ignore[assignment,misc]
        sume_resume.Part = mined(sume_resume.Part, PART_STEPS, point)  # type: ignore[assignment,misc]
    sys.argv = ["sume-resume", *order["args"]]
    try:
        sume_resume.main()
    except SystemExit as exc:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exc.code if isinstance(exc.code, int) else 1)
    os._exit(0)


def serve() -> None:
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            work(json.loads(line))
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        work(json.loads(sys.argv[1]))
    serve()
