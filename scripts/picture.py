"""Records `retinue demo` on a terminal as a person sees it: an asciinema file, and a picture of what it leaves.

Usage: picture.py OUT.svg OUT.cast. The question is answered with one key, and is in the picture as it was on screen.
"""

import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
import time
from fcntl import ioctl
from pathlib import Path

from rich.console import Console
from rich.text import Text

COLUMNS, ROWS = 100, 30
KEYS, ANSWER = b"[y]es [n]o [a]", b"y"
READING_SECONDS = 2.0  # that a person looks at the question
SCRATCH = re.compile(r"\S*/retinue-demo-\w+")
BOTTOM = re.compile(r"\x1b\[\?7l(.*?)\x1b\[\?7h", re.DOTALL)
MOVES = re.compile(r"(?:\x1b\[2m)?◐ starting(?:\x1b\[0m)?\r\x1b\[K|\x1b\[[?0-9;]*[A-HJKhl]|\r")


def record_demo() -> list[tuple[float, str]]:
    """Run the demo and answer its question; return what it wrote and when."""
    master, slave = pty.openpty()
    ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    # On the PATH, its hints name the command without the folder that it is in.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    kept = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    process = subprocess.Popen(
        ["retinue", "demo"], env={**kept, "PATH": path, "TERM": "xterm-256color"},
        stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
    )  # fmt: skip
    os.close(slave)
    began, written, seen = time.monotonic(), [], b""
    while True:
        try:
            chunk = os.read(master, 65536)
        except OSError:
            chunk = b""
        if not chunk:
            break
        written.append((time.monotonic() - began, chunk))
        is_asked = KEYS in seen
        seen += chunk
        if KEYS in seen and not is_asked:
            threading.Event().wait(READING_SECONDS)
            os.write(master, ANSWER)
    if process.wait() != 0:
        raise SystemExit("the demo failed")
    return [(at, SCRATCH.sub("/tmp/retinue-demo", chunk.decode("utf-8", "replace"))) for at, chunk in written]


def flatten_screen(text: str) -> str:
    """Return the lasting lines, and the bottom of the screen with the question when it was answered."""
    asked = [bottom for bottom in BOTTOM.finditer(text) if KEYS.decode() in re.sub(r"\x1b\[[0-9;]*m", "", bottom[1])]
    pieces, start = [], 0
    for bottom in BOTTOM.finditer(text):
        pieces.append(text[start : bottom.start()])
        if asked and bottom.start() == asked[-1].start():
            pieces.append(bottom[1].replace("\r", "").rstrip() + "\n\n")
        start = bottom.end()
    return MOVES.sub("", "".join([*pieces, text[start:]])).strip()


def main(picture: str, cast: str) -> None:
    recorded = record_demo()
    header = {"version": 2, "width": COLUMNS, "height": ROWS, "title": "retinue demo"}
    lines = [json.dumps(header), *(json.dumps([round(at, 3), "o", text]) for at, text in recorded)]
    Path(cast).write_text("\n".join(lines) + "\n", encoding="utf-8")
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere:
        console = Console(record=True, width=COLUMNS, file=nowhere, force_terminal=True, color_system="truecolor")
        console.print(Text.from_ansi(flatten_screen("".join(text for _, text in recorded))))
        console.save_svg(picture, title="retinue demo", unique_id="retinue-demo")


if __name__ == "__main__":
    main(*sys.argv[1:])
