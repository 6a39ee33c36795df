"""The panel of pinned questions: what it says of each, and how the user goes to another one."""

import os
from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from retinue.core.approvals import Approval
from retinue.surfaces.printer import approver
from retinue.surfaces.printer.keys import Key
from retinue.surfaces.printer.question_panel import HELP, QuestionPanel
from retinue.surfaces.printer.screen import Screen
from retinue.surfaces.printer.terminal import Terminal


def ask(tree: str, number: int = 1) -> Approval:
    return Approval(f"{tree}/0/{number}", tree, 0, "/main", "main", "write", {"path": "a"}, "c", number=number)


@pytest.fixture
def screen() -> Iterator[Screen]:
    """A screen that draws nothing, because it is not open."""
    master, slave = os.openpty()
    yield Screen(Terminal(input_fd=slave, output_fd=slave), color=False)
    os.close(slave)
    os.close(master)


def open_panel(screen: Screen, *questions: Approval, names_runs: bool) -> QuestionPanel:
    panel = QuestionPanel(screen, lambda question, decision: None, names_runs=names_runs)
    panel.show_questions({each.id: each for each in questions})
    return panel


def read(panel: QuestionPanel, columns: int = 80) -> list[str]:
    lines, _ = panel.layout_lines(columns, 24)
    return ["".join(text for _, text in line) for line in lines]


def press(panel: QuestionPanel, *names: str) -> None:
    for name in names:
        panel.is_armed = True  # as if the question were on the screen
        panel.press_key(Key(name))


@pytest.mark.parametrize(
    ("columns", "shown"),
    [
        (80, ["◐ write(a)  main · question 1 of t1/0, 1 more waits"]),
        (50, ["◐ write(a)", "  main · question 1 of t1/0, 1 more waits"]),
        (26, ["◐ write(a)", "  main · question 1 of", "  t1/0, 1 more waits"]),
    ],
)
def test_the_run_is_named_where_questions_of_several_trees_are_shown(
    screen: Screen, columns: int, shown: list[str]
) -> None:
    panel = open_panel(screen, ask("t1"), ask("t2"), names_runs=True)
    assert read(panel, columns)[: len(shown)] == shown


def test_the_run_is_not_named_where_one_tree_is_shown(screen: Screen) -> None:
    panel = open_panel(screen, ask("t1"), ask("t1", 2), names_runs=False)
    assert read(panel)[0] == "◐ write(a)  main · question 1, 1 more waits"


def test_the_help_of_the_keys_fits_a_terminal_of_80_columns(screen: Screen) -> None:
    panel = open_panel(screen, replace(ask("t1"), rule="write(a)"), names_runs=False)
    press(panel, "?")
    shown = read(panel, 80)
    assert set(HELP) <= set(shown)
    typed = approver.HELP.format(always=approver.ALWAYS_HELP).splitlines()
    assert max(map(len, typed)) <= 80


def test_a_number_goes_to_the_next_question_that_has_it(screen: Screen) -> None:
    panel = open_panel(screen, ask("t1"), ask("t1", 2), ask("t2"), ask("t3"), names_runs=True)
    for key, run in (
        ("1", "1 of t2/0"),
        ("1", "1 of t3/0"),
        ("1", "1 of t1/0"),
        ("2", "2 of t1/0"),
        ("1", "1 of t1/0"),
    ):
        press(panel, key)
        assert f"question {run}, 3 more wait" in read(panel)[0]
    press(panel, "3")
    assert "no question 3 is waiting" in read(panel)
