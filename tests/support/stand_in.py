"""Stands in for a service under a LocalStack: `stand_in.py NAME DIARY [LISTEN]`.

Writes "NAME started" and "NAME stopped" into DIARY; with LISTEN it answers as a planner. Ends on SIGTERM, and not
before a file DIARY.hold is gone.
"""

import signal
import sys
import threading
import time
from pathlib import Path


def main() -> None:
    name, diary = sys.argv[1], Path(sys.argv[2])
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: stop.set())
    signal.signal(signal.SIGUSR1, lambda number, frame: note(diary, f"{name} asked for its state"))
    note(diary, f"{name} started")
    print(f"hello from {name}", flush=True)
    if len(sys.argv) > 3:
        from support.inference import inference_server  # Slow to import; the workers do without.

        with inference_server(sys.argv[3]):
            wait_and_end(name, diary, stop)
    else:
        wait_and_end(name, diary, stop)


def wait_and_end(name: str, diary: Path, stop: threading.Event) -> None:
    while not stop.is_set():
        time.sleep(0.02)
    note(diary, f"{name} stopping")
    while Path(f"{diary}.hold").exists():
        time.sleep(0.02)
    note(diary, f"{name} stopped")


def note(diary: Path, line: str) -> None:
    with diary.open("a") as file:
        file.write(line + "\n")


main()
