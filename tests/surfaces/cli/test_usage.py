"""The command line in real processes: budgets, stalls, usage, costs in lists, transcripts and audits."""

import json
import signal
import threading
import time
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

import retinue
from retinue import Profile
from retinue.testing import FixedPrices, ManualClock, scripted
from tests.supervisor.tree.kit import call, spawn
from tests.surfaces.cli.shell import Project, one_line_error, read_until, until
from tests.surfaces.cli.test_help_and_run_names import show_on_terminal

USAGE = {"input_tokens": 1000, "output_tokens": 100}
DAY = 86400.0


class Named:
    """A scripted model under a name of its own."""

    def __init__(self, name: str, agents: dict[str, Any]) -> None:
        self.name = name
        self.complete = scripted(agents).complete


async def spend(project: Project, *, model: str = "dear", task: str = "go", age: float = 0.0) -> str:
    """A tree in the project's log, begun that long ago: a primary and a child of a model with a price; its id."""
    agents = {
        "main": [{**spawn({"task": "x", "subagent_type": "kid"}), "usage": USAGE}, {"text": "end", "usage": USAGE}],
        "kid": [{"text": "kid done", "usage": USAGE}],
    }
    state, prices = project.folder / ".retinue", FixedPrices({"dear": ("3", "15"), "cheap": ("0.001", "0.001")})
    clock = ManualClock(wall=time.time() - age)
    async with retinue.open(state, mode="yes", prices=prices, profiles=[Profile("kid")], clock=clock) as r:
        result = await r.run(Profile("main", model=Named(model, agents)), task)
    assert result.status == "done"
    return result.tree


def usage(project: Project, *arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(project.retinue("usage", "--json", *arguments).stdout)
    return found


async def test_usage_adds_up_by_everything(project: Project) -> None:
    first, second = await spend(project, age=3 * DAY), await spend(project, model="mystery")
    whole = usage(project)
    assert [row["usage"]["input_tokens"] for row in whole["rows"]] == [3000, 3000]
    assert whole["total"]["cost"] is None  # part of it is not known, so nobody says a sum
    assert Decimal(whole["total"]["known_cost"]) == Decimal("0.0135")
    assert whole["total"]["unpriced_tokens"] == 3300
    recent = usage(project, "--since", "1d", "--by", "tree")
    assert [(row["tree"], row["cost"], row["calls"]) for row in recent["rows"]] == [(second, None, 3)]
    by_model = {row["model"]: row["cost"] for row in usage(project, "--by", "model")["rows"]}
    assert by_model["mystery"] is None and Decimal(by_model["dear"]) == Decimal("0.0135")
    by_profile = {row["profile"]: row["calls"] for row in usage(project, "--by", "profile")["rows"]}
    assert by_profile == {"main": 4, "kid": 2}
    assert {row["run"] for row in usage(project, "--by", "run")["rows"]} == {
        f"{tree}/{run}" for tree in (first, second) for run in (0, 1)
    }
    lines = project.retinue("usage", "--by", "model").stdout.splitlines()
    assert lines[0].split() == ["MODEL", "CALLS", "INPUT", "OUTPUT", "CACHED", "TOKENS", "COST"]
    assert lines[1].split() == ["dear", "3", "3,000", "300", "0", "3,300", "$0.0135"]
    assert lines[2].split()[-1] == "unknown"
    assert lines[3].endswith("$0.0135 + unknown")


async def test_usage_on_a_narrow_terminal_shortens_the_name_and_drops_columns(project: Project) -> None:
    """Numbers and costs stay whole."""
    name = "scripted:" + "long/" * 8 + "end"
    await spend(project, model=name)
    await spend(project)
    whole = ["MODEL", "CALLS", "INPUT", "OUTPUT", "CACHED", "TOKENS", "COST"]
    for columns, heads in (
        (120, whole),
        (80, whole),
        (60, ["MODEL", "CALLS", "OUTPUT", "TOKENS", "COST"]),
        (46, ["MODEL", "TOKENS", "COST"]),
    ):
        lines = show_on_terminal(project, "usage", "--by", "model", COLUMNS=str(columns))
        assert all(len(line) <= columns for line in lines) and lines[0].split() == heads
        assert [line.split()[-len(heads) + 1 :][-2:] for line in lines[1:3]] == [
            ["3,300", "$0.0135"],
            ["3,300", "unknown"],
        ]
        assert lines[3].endswith("  6,600  $0.0135 + unknown")
        assert lines[2].split()[0] == name if columns == 120 else lines[2].split()[0].endswith("…")
        lines = show_on_terminal(project, "usage", COLUMNS=str(columns))
        assert lines[0].startswith("DAY") and lines[1][:10].count("-") == 2 and lines[1].endswith("  $0.0135 + unknown")


def test_usage_of_nothing_is_a_friendly_line(project: Project) -> None:
    assert project.retinue("usage").stdout == "Nothing was spent here yet.\n"
    assert usage(project)["total"]["cost"] == "0"
    assert not (project.folder / ".retinue").exists()
    assert "must be a length of time" in one_line_error(project.retinue("usage", "--since", "soon"))
    assert "invalid choice" in one_line_error(project.retinue("usage", "--by", "moon"))


async def test_lists_and_pages_have_the_cost_where_one_is_known(project: Project) -> None:
    await spend(project, model="mystery")
    assert "COST" not in project.retinue("ps").stdout
    page = project.retinue("show").stdout
    assert "cost        unknown, and with all below it unknown" in page
    tree = await spend(project)
    lines = project.retinue("ps").stdout.splitlines()
    assert "COST" in lines[0]
    assert ["$0.0090" in lines[1], "$0.0045" in lines[2], "unknown" in lines[3]] == [True] * 3
    rows = {(row["tree"] == tree, row["run"]): row["cost"] for row in project.rows()}
    assert (Decimal(rows[True, 0] or 0), rows[False, 0]) == (Decimal("0.009"), None)
    assert "cost        $0.0090, and with all below it $0.0135" in project.retinue("show", tree).stdout
    assert json.loads(project.retinue("show", tree, "--json").stdout)["cost"] == rows[True, 0]


async def test_ps_since_shows_only_what_is_new_enough(project: Project) -> None:
    for _ in range(12):
        await spend(project, task="old", age=3 * DAY)
    tree = await spend(project, task="new")
    assert {row["tree"] for row in project.rows("--all", "--since", "1d")} == {tree}
    assert len({row["tree"] for row in project.rows("--since", "4d")}) == 13
    assert "12 older trees are not shown" in project.retinue("ps", "--since", "1d").stdout
    assert project.retinue("ps", "--since", "0s").stdout == "No runs in that time.\n"


@pytest.mark.parametrize(
    ("option", "value"),
    [("--max-tokens", "-1"), ("--max-tokens", "1.5"), ("--max-cost", "-1"), ("--max-cost", "nan"),
     ("--max-cost", "inf"), ("--max-cost", "1e3"), ("--max-cost", "much"), ("--stall", "-1"), ("--stall", "nan")],
)  # fmt: skip
@pytest.mark.requirement("P28")
def test_a_wrong_budget_is_one_line_and_exit_2(project: Project, option: str, value: str) -> None:
    done = project.run(f"{option}={value}", agents={"main": ["ok"]})
    assert option in one_line_error(done)


@pytest.mark.requirement("P28")
def test_a_token_budget_ends_the_run(project: Project) -> None:
    agents = {"main": [{**call("list_agents"), "usage": {"input_tokens": 6000}}] * 5}
    done = project.run("--max-tokens", "10000", agents=agents)
    assert (done.returncode, done.stdout) == (1, "")
    assert (
        "retinue: limited: Run 'main' stopped: the budget of 10,000 tokens of the tree is spent (12,000 used)"
        in done.stderr
    )
    assert "budget      10,000 tokens" in project.retinue("show").stdout
    done = project.run("--max-tokens", "0", agents=agents)
    assert "(0 used)" in done.stderr
    (project.folder / "retinue.yaml").write_text("max_tokens: 10000\n")
    assert project.run(agents=agents).returncode == 1
    assert project.run("--max-tokens", "none", agents=agents).returncode == 0


@pytest.mark.finding("U4")
def test_a_budget_that_is_too_small_is_one_line_before_anything_is_spent(project: Project) -> None:
    agents = {"main": ["never said"], "kid": ["never said"]}
    said = one_line_error(project.run("--max-tokens", "10", agents=agents))
    assert said.startswith("the budget of 10 tokens of the tree is too small for the first request: its instructions,")
    assert said.endswith("tokens; raise the limit 'tokens' (--max-tokens) or leave it out")
    (project.folder / "retinue.yaml").write_text("max_tokens: 10\n")
    assert one_line_error(project.run(agents=agents)) == said
    assert project.rows() == []
    agents["main"] = [{"text": "the answer", "usage": {"input_tokens": 9000}}]  # type: ignore[list-item]
    done = project.run("--max-tokens", "8000", agents=agents)
    assert (done.returncode, done.stdout) == (0, "the answer\n")
    assert "⚠ the budget of 8,000 tokens of the tree was exceeded: 9,000 used" in done.stderr


def test_a_cost_budget_without_a_price_refuses_at_the_start(project: Project) -> None:
    done = project.run("--max-cost", "1.50", agents={"main": ["ok"]})
    assert "is not known: limit tokens instead" in one_line_error(done)
    assert project.rows() == []


def test_a_stalled_run_says_so_and_ends(project: Project) -> None:
    done = project.run("--stall", "0.2", agents={"main": [{"text": "hm", **call("list_agents")}, {"hang": True}]})
    assert done.returncode == 124
    assert "⚠ stalled: nothing has happened in this run for 0.2 s" in done.stderr
    assert "timed_out: Run 'main' timed out: stalled, nothing happened in it for 0.4 s" in done.stderr


@pytest.mark.requirement("P21")
def test_a_process_that_was_suspended_keeps_its_deadline(project: Project) -> None:
    """Ended at once when it goes on, and not a whole deadline later; a slow machine needs a longer deadline to tell."""
    assert any(is_ended_after_suspension(project, deadline) for deadline in (3, 12, 48))


def is_ended_after_suspension(project: Project, deadline: float) -> bool:
    """Suspend a run until its deadline is over. False if it ended before that, or long after."""
    model = project.script({"main": [call("list_agents"), {"hang": True}]})
    with project.running("run", "wait", "--model", model, "--timeout", str(deadline), quick=False) as process:
        assert process.stderr is not None
        read_until(process.stderr, 'Tool "list_agents" result')
        state = Path(f"/proc/{process.pid}/stat")
        until(lambda: state.read_text().rpartition(")")[2].split()[0] in "SZ")  # it waits, for no less than is left
        process.send_signal(signal.SIGSTOP)
        if any(event["kind"] == "run.ended" for event in project.events()):
            return False
        threading.Event().wait(deadline + 0.5)
        process.send_signal(signal.SIGCONT)
        went_on = time.time()
        process.stderr.read()
        assert process.wait() == 124
    return bool(project.events()[-1]["at"] - went_on < deadline - 0.5)


async def test_show_markdown_is_the_transcript(project: Project) -> None:
    tree = await spend(project, task="say *it*")
    page = project.retinue("show", tree, "--markdown").stdout
    assert page.startswith("# main [main]\n\n/main in tree ")
    assert "## Task\n\nsay *it*\n" in page
    assert page.rstrip().endswith("## Ended: done\n\nend")
    assert "kid done" in project.retinue("show", f"{tree}/1", "--markdown").stdout


async def test_show_tools_is_an_audit(project: Project) -> None:
    (project.folder / "a.txt").write_text("one\n")

    async def answer(question: retinue.Approval) -> Any:
        return retinue.Deny("not today") if question.tool == "shell" else retinue.Allow()

    edit = call("edit", path="a.txt", old_string="one", new_string="two")
    agents = {
        "main": [edit, spawn({"task": "x", "subagent_type": "kid"}), {"text": "end"}],
        "kid": [call("shell", command="rm -rf /"), call("glob", pattern="*"), {"text": "ok"}],
    }
    async with retinue.open(project.folder / ".retinue", approver=answer, profiles=[Profile("kid")]) as r:
        result = await r.run(Profile("main", model=scripted(agents), workspace="shared"), "go")
    assert result.status == "done"
    page = project.retinue("show", "--tools", "shell,edit").stdout
    assert "✓ edit(a.txt)  /main  " in page
    assert "  approved by function\n  -> edited" in page
    assert "    -one\n    +two\n" in page
    assert "✗ shell(rm -rf /)  /main/kid-1  " in page
    assert "  denied by function: not today\n" in page
    assert "glob" not in page
    found = json.loads(project.retinue("show", "--tools", "*", "--json").stdout)
    assert [(action["tool"], action["permission"]) for action in found if action["tool"] == "glob"] == [
        ("glob", "nobody was asked")
    ]
    assert project.retinue("show", "/main/kid-1", "--tools", "edit").stdout.startswith("No such tool ran in ")
    assert "not allowed with" in one_line_error(project.retinue("show", "--tools", "edit", "--markdown"))


async def test_show_tools_tells_rules_and_edited_calls(project: Project) -> None:
    async def answer(question: retinue.Approval) -> Any:
        return retinue.Allow(args={"command": "echo edited"})

    commands = [call("shell", command=f"echo {word}") for word in ("ruled", "asked")]
    async with retinue.open(project.folder / ".retinue", approver=answer, allow=["shell(echo ruled)"]) as r:
        await r.run(Profile("main", model=scripted({"main": [*commands, {"text": "end"}]}), workspace="shared"), "go")
    ruled, edited = json.loads(project.retinue("show", "--tools", "shell", "--json").stdout)
    assert (ruled["asked"], ruled["permission"]) == (False, "approved by rule: shell(echo ruled)")
    assert (edited["asked"], edited["permission"]) == (True, "approved by function")
    assert edited["args"] == {"command": "echo edited"}
    page = project.retinue("show", "--tools", "shell").stdout
    assert "✓ shell(echo edited)" in page
    assert "echo asked" not in page
