"""The tree picture: branches, states, counts, and the status bar."""

from decimal import Decimal

from retinue.core.events import (
    ApprovalAsked,
    RunEnded,
    RunSpawned,
    RunStarted,
    ToolCall,
    TurnStarted,
    UsageReported,
)
from retinue.core.usage import Usage
from retinue.log.activity import Totals
from retinue.log.runs import RunCounts, Runs
from retinue.surfaces.printer.totals import format_status, format_summary
from tests.surfaces.printer.facts import ANNA, BERT, MAIN, Facts

KID = (2, "/main/anna-1/kid-2", "kid")


def a_tree() -> Runs:
    facts = Facts()
    events = [
        facts.spawn(MAIN, "main"),
        facts(MAIN, RunStarted()),
        facts.spawn(ANNA, "research"),
        facts(ANNA, RunStarted()),
        facts(KID, RunSpawned(1, "deep 価格", 2, "dig", "kid_1", "/w")),
        facts.spawn(BERT, "waits", queued=True),
        facts(KID, RunStarted()),
        facts(KID, TurnStarted(2)),
        facts(KID, ToolCall("c", "read", {})),
        facts(KID, UsageReported("m", Usage(1000, 200))),
        facts(KID, RunEnded("done", "x", 1500)),
        facts(MAIN, TurnStarted(1)),
        facts(MAIN, UsageReported("m", Usage(30, 4))),
        facts(ANNA, ApprovalAsked("a", "c", "edit", {})),
    ]
    return Runs.of("t1", events)


def test_rows_draw_the_tree() -> None:
    branches = a_tree().list_branches()
    assert [(branch, run.agent, run.label, run.state) for branch, run in branches] == [
        ("", "main", "main", "running"),
        ("├─ ", "anna", "research", "waiting_approval"),
        ("│  └─ ", "kid", "deep 価格", "done"),
        ("└─ ", "bert", "waits", "queued"),
    ]
    assert [run.measure_seconds(1_700_000_012.0) for _, run in branches] == [10.0, 8.0, 1.5, 0.0]


def test_without_a_time_it_is_the_last_start_or_end() -> None:
    assert format_summary(a_tree()).split("\n")[5].endswith("  9.0s")


def test_the_status_bar() -> None:
    assert a_tree().counts().describe() == "Agents: 1 primary, 1 running, 1 queued, 1 finished"
    assert Runs("t1").counts().describe() == "Agents: 0 primary, 0 running, 0 finished"


def test_the_summary_is_aligned() -> None:
    assert format_summary(a_tree(), now=1_700_000_012.0).split("\n") == [
        "                       state             turns  tools  tokens   time",
        "main                   running               1      0      34  10.0s",
        "├─ anna [research]     waiting_approval      0      0       0   8.0s",
        "│  └─ kid [deep 価格]  done                  2      1   1,200   1.5s",
        "└─ bert [waits]        queued                0      0       0   0.0s",
        "total                  4 runs                3      1   1,234  10.0s",
        "",
        "Agents: 1 primary, 1 running, 1 queued, 1 finished",
    ]


def test_a_long_label_ends_in_an_ellipsis() -> None:
    facts = Facts()
    runs = Runs.of("t1", [facts.spawn(MAIN, "main"), facts.spawn(ANNA, "x" * 200)])
    row = format_summary(runs).split("\n")[2]
    assert "xxx…  " in row
    assert len(row) < 100


def test_an_empty_tree_is_no_problem() -> None:
    assert "0 runs" in format_summary(Runs("t1"))


def test_the_status_bar_has_time_tokens_cost_and_what_is_left_as_far_as_they_fit() -> None:
    totals = Totals(
        agents=RunCounts(primary=1, running=2, finished=1),
        tokens=23_454,
        cost=Decimal("0.0312"),
        seconds=75,
        cost_left=Decimal("0.97"),
    )
    agents = "Agents: 1 primary, 2 running, 1 finished"
    for width, rest in (
        (90, " · 1m15s · 23,454 tokens · $0.0312 · $0.97 left"),
        (80, " · 1m15s · 23k tok · $0.03 · $0.97 left"),
        (70, " · 1m15s · $0.03 · $0.97 left"),
        (61, " · 1m15s · $0.97 left"),
        (50, " · 1m15s"),
        (40, ""),
        (20, ""),
    ):
        assert format_status(totals, width=width) == agents + rest
