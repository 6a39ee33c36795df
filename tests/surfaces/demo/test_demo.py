"""The demo as a stranger meets it: in a process of its own, with and without a terminal."""

import codecs
import html
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from retinue.log.sqlite import SqliteLog
from scripts.picture import flatten_screen
from tests.surfaces.tmux import Tmux

REPO = Path(__file__).resolve().parents[3]
PROGRAM = """
import argparse, sys
from retinue.surfaces.cli import demo
parser = argparse.ArgumentParser()
demo.configure_demo(parser)
sys.exit(demo.execute_demo(parser.parse_args()))
"""
SAMPLE = REPO / "src/retinue/surfaces/cli/sample"
WIDE = 220  # the folder of a test fits on one line
CHECKS = ["-m", "unittest", "checks.check_till"]


def command(*options: str) -> list[str]:
    return [sys.executable, "-c", PROGRAM, "--fast", *options]


def environment(tmp_path: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
    return kept | {"TMPDIR": str(tmp_path), "PYTHONPATH": str(REPO / "src"), "TERM": "xterm"}


def files(folder: Path) -> dict[str, bytes]:
    found = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}


def project_in(text: str) -> Path:
    found = re.search(r"copy in\s(.+?/till)\.\s", text, re.DOTALL)
    assert found is not None
    return Path(found[1].replace("\n", " "))  # where a line was broken


def read_example(page: Path) -> list[list[str]]:
    """The pieces of the first example of a page, which are parted by dots."""
    example = page.read_text().partition("$ make demo\n...\n")[2].partition("```")[0]
    return [piece.rstrip("\n").split("\n") for piece in example.split("...\n")]


def checks_pass(project: Path) -> bool:
    return subprocess.run([sys.executable, *CHECKS], cwd=project, capture_output=True, check=False).returncode == 0


def at_a_terminal(tmp_path: Path, answer: str) -> tuple[int, str]:
    """Runs the demo with all its streams on a pseudo-terminal and answers its question."""
    master, terminal = os.openpty()
    process = subprocess.Popen(
        command("--plain"), cwd=tmp_path, env=environment(tmp_path), stdin=terminal, stdout=terminal, stderr=terminal,
        start_new_session=True,
    )  # fmt: skip
    os.close(terminal)
    screen, answered, decoder = "", False, codecs.getincrementaldecoder("utf-8")()
    with os.fdopen(master, "rb", buffering=0) as source:
        while True:
            try:
                chunk = source.read(65536)
            except OSError:  # the last one on the other side has closed it
                break
            if not chunk:
                break
            screen += decoder.decode(chunk)
            if not answered and "[y]es [n]o > " in screen:
                os.write(master, answer.encode())
                answered = True
    assert answered
    return process.wait(timeout=200), re.sub(r"\x1b\[[0-9;]*[mK]", "", screen).replace("\r", "")


@pytest.mark.requirement("CPE-5", "CPE-6", "CPE-12", "CPE-13", "CPE-16", "CPE-19", "CODEY-2")
def test_without_a_terminal_the_demo_s_own_policy_answers(tmp_path: Path) -> None:
    before = files(SAMPLE)
    done = subprocess.run(
        command(), cwd=tmp_path, env=environment(tmp_path), stdin=subprocess.DEVNULL, capture_output=True,
        encoding="utf-8", timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("An order of exactly 100.00 missed its discount")
    assert "after the fixer left: OK\n" in done.stdout
    for block in (
        "#### thought trace\n",
        "#### [tool call]\nspawn_subagents\n",
        '#### tester [tool call] (timeout: 60s)\nshell\n{\n  "command": "python3 -m unittest checks.check_till"',
        '#### tester Tool "shell" result:\n',
        "FAILED (failures=1)\n[exit code 1]\n",
        "#### scout [where is it decided?] [tool call]\ngrep\n",
        "till/pricing.py:9:    if subtotal > DISCOUNT_FROM:\n",
        '#### Tool "subagent_fixer" result:\nedited till/pricing.py\n',
        "◐ [fix the case of exactly 100.00] edit(till/pricing.py)\n",
        "│ -    if subtotal > DISCOUNT_FROM:\n│ +    if subtotal >= DISCOUNT_FROM:\n",
        "✓ approved [fix the case of exactly 100.00] edit(till/pricing.py) by the demo's policy\n",
        "│  ├─ scout [where is it decided?]",
        "Agents: 1 primary, 0 running, 7 finished\n",
        "Look closer:\n",
    ):
        assert block in done.stderr, block
    assert "missed its discount" not in done.stderr
    project = project_in(done.stderr)
    assert project.is_relative_to(tmp_path)
    assert checks_pass(project)
    assert [entry.name for entry in tmp_path.iterdir()] == [project.parent.name]
    assert files(SAMPLE) == before


async def test_the_log_stays_to_be_looked_at(tmp_path: Path) -> None:
    done = subprocess.run(
        command("--quiet"), cwd=tmp_path, env=environment(tmp_path), stdin=subprocess.DEVNULL, capture_output=True,
        encoding="utf-8", timeout=200, check=False,
    )  # fmt: skip
    assert "tester shell(python3 -m unittest checks.check_till) -> ..F." in done.stderr
    assert "####" not in done.stderr
    log = SqliteLog(project_in(done.stderr) / ".retinue" / "logs")
    try:
        named = re.search(r"show (\w+)/6", done.stderr)
        assert named is not None
        asked = [event for event in await log.read(named[1]) if event.kind == "approval.asked"]
    finally:
        await log.close()
    assert [event.agent for event in asked] == ["fixer"]


def test_a_person_says_yes(tmp_path: Path) -> None:
    code, screen = at_a_terminal(tmp_path, "y\n")
    assert code == 0
    assert "You will be asked before it is edited." in screen
    assert screen.count("◐ [fix the case of exactly 100.00] edit(till/pricing.py)") == 1
    assert screen.index("#### fixer [tool call]") < screen.index("◐") < screen.index("+    if subtotal >=")
    assert "✓ approved" in screen
    assert "demo's own policy" not in screen
    assert "after the fixer left: OK" in screen
    assert checks_pass(project_in(screen))


def test_a_person_says_no(tmp_path: Path) -> None:
    code, screen = at_a_terminal(tmp_path, "n too risky\n")
    assert code == 0
    assert "✗ denied [fix the case of exactly 100.00] edit(till/pricing.py): too risky" in screen
    assert "The user denied this call: too risky" in screen
    assert "after the fixer left: FAILED (failures=1)" in screen
    project = project_in(screen)
    assert not checks_pass(project)
    assert (project / "till/pricing.py").read_bytes() == (SAMPLE / "till/pricing.py").read_bytes()


@pytest.mark.finding("U9")
def test_the_default_view_is_short_and_asks_one_real_question(tmp_path: Path) -> None:
    env = {**environment(tmp_path), "NO_COLOR": "1", "PYTHONUTF8": "1"}
    terminal = Tmux(tmp_path, command(), env=env, columns=WIDE, rows=50)
    try:
        screen = terminal.read_until("[y]es [n]o")
        assert "◐ [fix the case of exactly 100.00] edit(till/pricing.py)" in screen
        assert "│ +    if subtotal >= DISCOUNT_FROM:" in screen
        assert "Agents: 1 primary, 1 running, 5 finished" in screen
        terminal.type("y")
        assert terminal.wait_for_end() == 0
        lasting = terminal.history.partition("\nPane is dead")[0].rstrip().split("\n")
    finally:
        terminal.close()
    assert len(lasting) < 40, lasting
    shown = "\n".join(lasting)
    question, answer = read_example(REPO / "README.md")
    assert all(line in screen.split("\n") for line in question)
    assert "\n".join(answer) in shown
    assert "✓ [fix the case of exactly 100.00] edit(till/pricing.py) → edited" in shown
    assert checks_pass(project_in(shown))
    recorded = read_recorded_lines(REPO / "docs/demo.cast")
    seen = normalise_lines(lasting)
    assert (recorded - seen - normalise_lines(screen.split("\n")), seen - recorded) == (set(), set()), "make picture"
    picture = html.unescape(re.sub(r"<[^>]*>", "", (REPO / "docs/demo.svg").read_text())).replace("\xa0", " ")
    assert all(line in picture for line in answer)


def read_recorded_lines(cast: Path) -> set[str]:
    """Return the lines that a recording leaves on the screen, the question among them."""
    _, *written = map(json.loads, cast.read_text().splitlines())
    screen = flatten_screen("".join(text for _, _, text in written))
    return normalise_lines(re.sub(r"\x1b\[[0-9;]*m", "", screen).split("\n"))


def normalise_lines(lines: Iterable[str]) -> set[str]:
    """Return the lines without ids, times and the demo's own folder."""
    text = "\n".join(line.strip() for line in lines)
    folder = r"'?/[^'\n]*?/till\b'?"
    for pattern, put in ((r"\b[0-9a-hjkmnp-tv-z]{12}\b", "TREE"), (r"\b[\d.]+s\b", "TIME"), (folder, "FOLDER")):
        text = re.sub(pattern, put, text)
    return set(text.split("\n"))


def test_a_team_fixes_it_three_times_votes_and_is_asked_about_once(tmp_path: Path) -> None:
    env = {**environment(tmp_path), "NO_COLOR": "1", "PYTHONUTF8": "1"}
    terminal = Tmux(tmp_path, command("--team"), env=env, columns=WIDE, rows=50)
    try:
        screen = terminal.read_until("[y]es [n]o")
        assert "◐ apply_subagent(fix the failing check)" in screen
        assert "│ +    if subtotal >= DISCOUNT_FROM:" in screen
        terminal.type("y")
        assert terminal.wait_for_end() == 0
        lasting = terminal.history.partition("\nPane is dead")[0].rstrip().split("\n")
    finally:
        terminal.close()
    assert len(lasting) < 40, lasting
    shown = "\n".join(lasting)
    example = re.findall(r"^◇ .*", (REPO / "docs/teams.md").read_text(), re.MULTILINE)
    assert example
    for line in (
        "◇ [fix the failing check] agent1 answers (agent1.1): The check expected too much.",
        *example,
        "● fixers [fix the failing check] done (13 turns, 12 tools, 15,637 tokens, ",
        "checks, with that fix: OK",
    ):
        assert shown.count(line) == 1, line
    assert "Apply:" not in shown, "it is applied"
    assert checks_pass(project_in(shown))


def test_ctrl_c_cancels_the_tree(tmp_path: Path) -> None:
    process = subprocess.Popen(
        command()[:-1], cwd=tmp_path, env=environment(tmp_path), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, encoding="utf-8",
    )  # fmt: skip
    assert process.stderr is not None
    heard = ""
    while "○ explorer" not in heard:
        line = process.stderr.readline()
        assert line, heard
        heard += line
    process.send_signal(signal.SIGINT)
    answer, rest = process.communicate(timeout=200)
    assert process.returncode == 130, rest
    assert answer == ""
    assert "cancelled: Run 'main' was cancelled" in rest
    assert "Agents: 1 primary, 0 running" in rest
    assert not checks_pass(project_in(heard))
