"""A tool that prints one endless line, through the real command line: memory stays flat and nothing is lost."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.soak.conftest import Note
from tests.surfaces.cli.shell import COMMAND, SECONDS, Project, environment

MOST_RSS_MIB = 200
# A process counts what its parent held when it forked, so a small one starts the command and measures it.
MEASURE = """
import json, os, subprocess, sys
out, err, report, *command = sys.argv[1:]
with open(out, "wb") as stdout, open(err, "wb") as stderr:
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr)
    _, status, used = os.wait4(process.pid, 0)
with open(report, "w") as file:
    json.dump({"code": os.waitstatus_to_exitcode(status), "rss": used.ru_maxrss * 1024}, file)
"""


def measured(project: Project, *arguments: str) -> tuple[int, int, str, bytes]:
    """Exit code, peak memory in bytes, stdout and stderr of one command."""
    out, err, report = (project.folder.parent / name for name in ("out", "err", "report.json"))
    command = [sys.executable, "-c", MEASURE, str(out), str(err), str(report), *COMMAND, *arguments]
    subprocess.run(command, cwd=project.folder, env=environment(), timeout=SECONDS, check=True)
    found = json.loads(report.read_text())
    return found["code"], found["rss"], out.read_text(), err.read_bytes()


def whole(path: Path, size: int) -> bool:
    """Return True if the file consists of `size` times the letter x."""
    with path.open("rb") as file:
        while chunk := file.read(1024 * 1024):
            size -= chunk.count(b"x")
            if len(chunk) != chunk.count(b"x"):
                return False
    return size == 0


def one_endless_line(folder: Path, note: Note, size: int, *options: str) -> None:
    project = Project(folder / "project")
    command = f"head -c {size} /dev/zero | tr '\\0' x"
    replies = [{"tools": [{"name": "shell", "args": {"command": command}}]}, {"text": "that was long"}]
    model = project.script({"main": replies})
    code, rss, answer, live = measured(
        project, "run", "go", "--runtime", "inherited", "--model", model, "--yes", *options
    )
    assert (code, answer) == (0, "that was long\n"), live[-2000:]
    [result] = [event for event in project.events() if event["kind"] == "tool.result"]
    assert "bytes cut" in result["text"] and result["file"] in result["text"]
    assert len(result["text"].encode()) <= 50 * 1024
    assert whole(Path(result["file"]), size)
    assert len(live) < 300 * 1024
    assert rss < MOST_RSS_MIB * 1024 * 1024, f"{rss // 1024 // 1024} MiB at the peak"
    note(output_MB=size / 1_000_000, peak_rss_MiB=rss / 1024 / 1024, stderr_bytes=len(live))


def test_a_long_line_is_cut_and_kept(tmp_path: Path, note: Note) -> None:
    one_endless_line(tmp_path, note, 5_000_000)


@pytest.mark.soak
@pytest.mark.parametrize("options", [(), ("--verbose",), ("--quiet",)])
def test_100_mb_in_one_line_leave_memory_flat(tmp_path: Path, note: Note, options: tuple[str, ...]) -> None:
    one_endless_line(tmp_path, note, 100_000_000, *options)
