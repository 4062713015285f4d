"""The baseline for throughput: httpx in threads that store nothing and decide nothing.

Arguments: the server's URL, how many jobs, how many threads. Each thread posts a body under a
key and reads the job that it got, with one httpx.Client, which keeps its connection.
"""

from __future__ import annotations

import queue
import sys
import threading

import httpx


def work(url: str, keys: queue.SimpleQueue[int | None]) -> None:
    with httpx.Client(headers={"Authorization": "Bearer bench"}) as client:
        while (number := keys.get()) is not None:
            answer = client.post(
                f"{url}/v1/videos",
                json={"model": "sume/auto", "mode": "async", "prompt": f"clip {number}"},
                headers={"Idempotency-Key": f"bare-{number}"},
            )
            id = answer.json()["job_id"]
            while client.get(f"{url}/v1/videos/{id}").json()["status"] != "completed":
                pass


def main() -> None:
    url, jobs, threads = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    keys: queue.SimpleQueue[int | None] = queue.SimpleQueue()
    for number in range(jobs):
        keys.put(number)
    crew = [threading.Thread(target=work, args=(url, keys)) for _ in range(threads)]
    for thread in crew:
        keys.put(None)
        thread.start()
    for thread in crew:
        thread.join()


if __name__ == "__main__":
    main()
