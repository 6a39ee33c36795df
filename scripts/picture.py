"""Turns what `retinue demo` prints on a terminal of 100 columns into an SVG. Usage: picture.py OUT.svg [COMMAND ...]"""

import os
import re
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

COLUMNS = 100
SCRATCH = re.compile(r"\S*/retinue-demo-\w+")


def main(out: str, *command: str) -> None:
    argv = list(command) or ["retinue", "demo", "--quiet"]
    # On the PATH, its hints name the command without the folder that it is in.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    environment = {**os.environ, "PATH": path, "FORCE_COLOR": "1", "COLUMNS": str(COLUMNS), "TERM": "xterm-256color"}
    done = subprocess.run(
        argv,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=True,
        encoding="utf-8",
    )
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere:
        console = Console(record=True, width=COLUMNS, file=nowhere, force_terminal=True, color_system="truecolor")
        console.print(Text.from_ansi(SCRATCH.sub("/tmp/retinue-demo", done.stdout)))
        Path(out).parent.mkdir(parents=True, exist_ok=True)
        console.save_svg(out, title="retinue demo", unique_id="retinue-demo")


if __name__ == "__main__":
    main(*sys.argv[1:])
