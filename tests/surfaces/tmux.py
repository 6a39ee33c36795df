"""A real terminal for tests: tmux on a server of the test's own, read as a person reads the screen."""

import os
import shlex
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tests.surfaces.cli.shell import until

SETTINGS = """\
set -g status off
set -g remain-on-exit on
set -g history-limit 50000
set -g escape-time 10
set -g default-terminal tmux-256color
"""


class Tmux:
    """One program in a terminal of a given size. `close` ends both."""

    def __init__(
        self,
        folder: Path,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: Path | None = None,
        columns: int = 80,
        rows: int = 24,
    ) -> None:
        self._socket = folder / "tmux"
        settings = folder / "tmux.conf"
        settings.write_text(SETTINGS)
        words = ["env", "-i", *(f"{name}={value}" for name, value in env.items()), *command]
        self._run(
            "-f", str(settings), "new-session", "-d", "-x", str(columns), "-y", str(rows), "-c", str(cwd or folder),
            f"exec {shlex.join(words)}",
        )  # fmt: skip

    @property
    def lines(self) -> list[str]:
        """The rows of the screen, without spaces at their ends."""
        return self._run("capture-pane", "-p").split("\n")[:-1]

    @property
    def text(self) -> str:
        return "\n".join(self.lines).rstrip()

    @property
    def history(self) -> str:
        """Everything there is to scroll back to, and the screen. Lines that the terminal broke are whole."""
        return self._run("capture-pane", "-p", "-J", "-S", "-").rstrip()

    @property
    def painted(self) -> str:
        """The screen with its colours."""
        return self._run("capture-pane", "-p", "-e")

    @property
    def exit_code(self) -> int | None:
        """The exit code of the program, as a shell says it; None while it runs."""
        state = self._run("display-message", "-p", "#{pane_dead}|#{pane_dead_status}|#{pane_dead_signal}|#{pid}")
        dead, code, killed, server = state.strip().split("|")
        if dead != "1":
            return None
        if code or killed:
            return int(code) if code else 128 + int(killed)
        os.kill(int(server), signal.SIGCHLD)  # tmux 3.3 can miss the end of its program: then it looks again
        return None

    @property
    def pid(self) -> int:
        return int(self._run("display-message", "-p", "#{pane_pid}"))

    def read_until(self, what: str | Callable[[str], object]) -> str:
        """Wait until the screen has a text, or something is true of it; return it."""
        seen = ""

        def is_there() -> bool:
            nonlocal seen
            seen = self.text
            return bool(what(seen)) if callable(what) else what in seen

        try:
            until(is_there)
        except AssertionError:
            raise AssertionError(f"{what!r} never came; the screen is:\n{seen}") from None
        return seen

    def wait_for_end(self) -> int:
        until(lambda: self.exit_code is not None)
        code = self.exit_code
        assert code is not None
        return code

    def type(self, text: str) -> None:
        """Press the keys of a text."""
        self._run("send-keys", "-l", "--", text)

    def press(self, *keys: str) -> None:
        """Press keys by tmux's names: Enter, Escape, C-c, Up, ..."""
        self._run("send-keys", *keys)

    def paste(self, text: str) -> None:
        """Paste as a terminal does: between marks, if the program asked for them."""
        self._run("set-buffer", "--", text)
        self._run("paste-buffer", "-p")

    def resize(self, columns: int, rows: int) -> None:
        self._run("resize-window", "-x", str(columns), "-y", str(rows))

    def close(self) -> None:
        self._run("kill-server")

    def _run(self, *words: str) -> str:
        done = subprocess.run(
            ["tmux", "-S", str(self._socket), *words], capture_output=True, encoding="utf-8", check=True
        )
        return done.stdout
