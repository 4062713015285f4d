"""Makes jobs.example.db: a simulated ledger as a kill leaves it, equal each time it is made.

python tests/make_example.py            # writes jobs.example.db at the top
python tests/make_example.py FILE       # writes FILE
"""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import sume_resume as sr  # noqa: E402  found by the line above, also without an install

# A moment that is fixed, so that the file is; the stand-in does not mind old keys.
AT_MS = 1_790_000_000_000
SALT = "00112233445566778899aabbccddeeff"
SCENES = [
    ("harbour-dawn", "A small harbour at dawn, gulls over the boats, slow pan to the left", 4),
    ("harbour-noon", "The same harbour at noon, a ferry comes in, wide shot", 5),
    ("harbour-dusk", "The harbour at dusk, lamps go on one by one", 6),
    ("market-fish", "Close-up of a fish stall, ice and silver scales, handheld", 4),
    ("market-crowd", "A market street from above, umbrellas in the rain", 5),
    ("market-cat", "A grey cat watches the fish stall from under a bench", 4),
    ("tram-inside", "Inside an old tram, wet windows, passengers sway", 5),
    ("tram-bell", "The driver's hand on the bell of the tram, macro", 4),
    ("tram-hill", "A tram climbs a steep street between yellow houses", 6),
    ("roof-laundry", "Laundry on a roof in the wind, the sea behind it", 5),
]
PICTURES = [
    ("poster-harbour", "Travel poster of a harbour, flat colours, two-tone sky"),
    ("poster-tram", "Travel poster of a yellow tram on a hill, flat colours"),
]


def rows() -> bytes:
    lines = [{"id": id, "prompt": prompt, "duration": s} for id, prompt, s in SCENES]
    lines += [{"id": id, "prompt": prompt, "kind": "image"} for id, prompt in PICTURES]
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def make(path: Path) -> None:
    """Write the ledger: three rows completed, two being sent at the kill, the rest queued."""
    path.unlink(missing_ok=True)
    defaults = sr.Defaults(fields={"model": "seedance-2.5"})
    sr.add_rows(path, io.BytesIO(rows()), "clips.jsonl", defaults, "example", at_ms=AT_MS)
    with sr.open_ledger(path) as ledger, ledger.transaction():
        ledger._execute(sr.SQL_SET_META, name="salt", value=SALT)
        account = sr.Account("http://127.0.0.1/v1", sr.STAND_IN, sr.STAND_IN_KEY)
        ledger.record_account(account.origin, account.fingerprint(SALT))
        jobs = ledger.with_status(sr.Status.QUEUED)
        for number, job in enumerate(jobs[:5]):
            at_ms = AT_MS + 1000 * (number + 1)
            sent = ledger.record_prepared(job, at_ms)
            if number < 3:
                complete(ledger, sent, at_ms)


def complete(ledger: sr.Ledger, job: sr.Job, at_ms: int) -> None:
    id = f"job_example{job.id}"
    accepted = ledger.record_accepted(job, id, at_ms + 200, at_ms + 1200)
    micros = (job.duration_s or 0) * sr.STAND_IN_VIDEO_MICROS_PER_S
    said = {
        "status": "completed",
        "usage": {"captured_usd_micros": micros, "status": "captured"},
        "url": f"/artifacts/{id}.mp4",
    }
    reading = sr.reading_of(sr.Reply(200, {}, said), id)
    ledger.record_final(accepted, sr.Status.COMPLETED, reading, None, at_ms + 5000)


if __name__ == "__main__":
    make(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "jobs.example.db")
