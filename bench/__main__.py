"""`python -m bench [NAME ...]`: runs the measurements (all, or those whose name contains NAME) and prints a table.

Every speed is a ratio against a reference of the same run. Exits with 1 when a stated limit is not held.
"""

from __future__ import annotations

import sys

from bench import a2a, counts, latency, logs, peers, questions, reports, sandboxes, screens, speed, start

MEASUREMENTS = {
    "speed": speed.rows,
    "many": speed.many_rows,
    "counts": counts.rows,
    "latency": latency.rows,
    "questions": questions.rows,
    "screens": screens.rows,
    "logs": logs.rows,
    "reports": reports.rows,
    "start": start.rows,
    "sandboxes": sandboxes.rows,
    "a2a": a2a.rows,
    "peers": peers.rows,
}


def main(wanted: list[str]) -> int:
    over = []
    print(f"{'what':68} {'measured':>14} {'ratio':>9}  limit")
    for name, measure in MEASUREMENTS.items():
        if wanted and not any(word in name for word in wanted):
            continue
        for row in measure():
            print(row.text(), flush=True)
            if row.is_over:
                over.append(row)
    for row in over:
        print(f"over its limit: {row.what}", file=sys.stderr)
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
