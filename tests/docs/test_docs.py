"""Docs cannot lie: the snippets and tables of single pages. `test_pages.py` has what holds for all of them."""

import inspect
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import retinue as library
from retinue.config.profiles import find_profiles
from retinue.config.project import load_project
from retinue.core.events import KINDS
from retinue.core.limits import ResourceLimits
from retinue.core.rules import MODES
from tests.docs.settings_reference import render_reference

ROOT = Path(__file__).parents[2]


def snippets(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def retinue(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "retinue", *arguments], cwd=cwd, capture_output=True, text=True, check=False
    )


def test_the_config_of_the_settings_page_loads(tmp_path: Path) -> None:
    [config] = snippets(ROOT / "docs/settings.md", "yaml")
    (tmp_path / "retinue.yaml").write_text(config)
    project = load_project(tmp_path, config=tmp_path / "retinue.yaml")
    assert project.warnings == ()
    assert [profile.name for profile in project.profiles] == ["explorer", "reviewer"]
    assert project.settings.coordination.subagent_max_timeout == 3600


def test_the_tables_of_the_settings_page_are_those_of_the_declarations() -> None:
    """`python -m tests.docs.settings_reference` prints them."""
    assert render_reference() in (ROOT / "docs/settings.md").read_text()


def test_the_table_of_the_page_of_teams_is_what_its_config_gives(tmp_path: Path) -> None:
    page = ROOT / "docs/teams.md"
    (tmp_path / "retinue.yaml").write_text(snippets(page, "yaml")[0])
    shown = retinue("profiles", "--teams", "--config", "retinue.yaml", cwd=tmp_path).stdout
    assert snippets(page, "console") == ["$ retinue profiles --teams\n" + shown.partition("\n\n")[0] + "\n"]


def test_the_snippets_of_the_page_of_teams_run(tmp_path: Path) -> None:
    for config in snippets(ROOT / "docs/teams.md", "yaml"):
        (tmp_path / "retinue.yaml").write_text(config)
        assert load_project(tmp_path, config=tmp_path / "retinue.yaml").warnings == ()
    [printed] = run_snippets("docs/teams.md", tmp_path)
    assert printed == [
        "Sound, but for line 9.",
        "agent1 optimist {'agent1.1': 'It is sound.'}",
        "agent2 sceptic {'agent2.1': 'Line 9 is off by one.'}",
    ]


def test_the_figures_of_the_page_of_teams_are_those_of_its_example(tmp_path: Path) -> None:
    example = ROOT / "docs/examples/team_costs.py"
    done = subprocess.run([sys.executable, str(example)], cwd=tmp_path, capture_output=True, text=True, check=True)
    measured = [re.split(r" {2,}", line) for line in done.stdout.splitlines()[1:]]
    rows = re.findall(r"^\| (.*) \| (\d+) \| ([\d,]+) \| ([\d.]+) s \|$", (ROOT / "docs/teams.md").read_text(), re.M)
    assert [(calls, tokens) for _, calls, tokens, _ in measured] == [row[1:3] for row in rows]
    for (*_, shown), (*_, took) in zip(rows, measured, strict=True):  # no less than the model takes, more under load
        assert float(took.removesuffix(" s")) >= float(shown)


def test_the_config_of_the_page_of_sandboxes_loads(tmp_path: Path) -> None:
    found = []
    for config in snippets(ROOT / "docs/sandbox.md", "yaml"):
        (tmp_path / "retinue.yaml").write_text(config)
        found.append(load_project(tmp_path, config=tmp_path / "retinue.yaml").settings)
    isolated, limited, network, container = found
    assert limited.resource_limits == ResourceLimits()
    assert network.network is not None and "git.example.org:8443" in network.network
    assert {name: given["network"] for name, given in network.profiles.items()} == {
        "explorer": "none",
        "researcher": ("docs.python.org",),
    }
    assert (isolated.coordination.subagent_runtime_mode, isolated.coordination.subagent_runtime_fallback_mode) == (
        "isolated",
        "inherited",
    )
    assert (container.coordination.subagent_runtime_mode, container.container_flags) == ("container", ("--cpus=2",))


def test_the_config_of_the_page_of_delegated_runs_loads(tmp_path: Path) -> None:
    [config] = snippets(ROOT / "docs/delegated.md", "yaml")
    (tmp_path / "retinue.yaml").write_text(config)
    settings = load_project(tmp_path, config=tmp_path / "retinue.yaml").settings
    assert (settings.coordination.subagent_runtime_mode, settings.coordination.subagent_delegation_directory) == (
        "delegated",
        "/srv/box/outbox",
    )


def test_what_the_page_of_mcp_servers_shows_works(tmp_path: Path) -> None:
    page = ROOT / "docs/mcp-servers.md"
    [config], [code] = snippets(page, "yaml"), snippets(page, "python")
    (tmp_path / "retinue.yaml").write_text(config)
    settings = load_project(tmp_path, config=tmp_path / "retinue.yaml").settings
    assert [server.name for server in settings.mcp_servers] == ["files", "tracker"]
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "done It is 5.\n"


def test_the_example_script_does_what_its_page_says(tmp_path: Path) -> None:
    page = " ".join((ROOT / "docs/scripts.md").read_text().split())
    assert "Save it as `review.yaml` in any folder, and try it there:" in page
    (tmp_path / "review.yaml").write_text((ROOT / "docs/examples/review.yaml").read_text())
    (tmp_path / "a.py").write_text("# TODO: more\n")
    done = retinue("run", "review this folder", "--model", "scripted:review.yaml", "--yes", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Here is what they found:")
    assert "a.py:1:# TODO: more" in done.stdout


def test_the_python_example_runs(tmp_path: Path) -> None:
    example = ROOT / "docs/examples/audit.py"
    done = subprocess.run([sys.executable, str(example)], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "done Finding(file='payment.py', risk=3)"


def test_the_python_of_going_on_runs(tmp_path: Path) -> None:
    [code] = snippets(ROOT / "docs/resume.md", "python")
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "nothing to do\n"


def test_the_page_of_events_names_every_kind_class_and_field_in_order() -> None:
    page = (ROOT / "docs/events.md").read_text()
    rows = re.findall(r"^\| `([a-z.]+)` \| `(\w+)` \|.*\| ?(.*) \|$", page, re.MULTILINE)
    assert [(kind, name) for kind, name, _ in rows] == [(kind, cls.__name__) for kind, cls in KINDS.items()]
    for kind, _, fields in rows:
        assert sorted(fields.strip("`").split()) == sorted(KINDS[kind].__struct_fields__), kind


def run_snippets(page: str, folder: Path) -> list[list[str]]:
    """Run each Python snippet of a page in the folder; return the lines that each prints."""
    printed = []
    for code in snippets(ROOT / page, "python"):
        done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        printed.append(done.stdout.splitlines())
    return printed


def test_the_python_of_the_page_of_the_library_runs(tmp_path: Path) -> None:
    one, typed, stream, built_in = run_snippets("docs/library.md", tmp_path)
    assert one == ["done Hello!"]
    assert typed == [
        "/main calls page_oncall {'reason': 'a TODO in the payment code'}",
        "/main may use page_oncall",
        "/main calls final_answer {'file': 'payment.py', 'risk': 3}",
        "/main is done",
        "payment.py 3",
    ]
    assert stream[0] == "Roses are red, violets are blue."
    pieces = "".join(line.removeprefix("/main '").removesuffix("'") for line in stream[1:-1])
    assert (pieces, stream[-1]) == (stream[0], "done")
    assert built_in == ["[('explorer', 'in parser.py')]"]


def test_the_python_of_the_page_of_events_runs(tmp_path: Path) -> None:
    [printed] = run_snippets("docs/events.md", tmp_path)
    assert "1 asked to say hello" in printed and "4 answered hello" in printed and "5 spent 0 tokens" in printed


def test_the_python_of_the_page_of_own_models_runs(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("")
    [printed] = run_snippets("docs/own-models.md", tmp_path)
    assert printed == ["There are |2| text files.|", "There are 2 text files. 293"]


def test_the_page_of_the_library_names_the_built_in_profiles() -> None:
    page = (ROOT / "docs/library.md").read_text()
    for definition in find_profiles(None):
        assert f"`{definition.profile.name}`" in page


def test_the_readme_names_only_targets_there_are() -> None:
    text = (ROOT / "README.md").read_text()
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"(?:^\$ |`)make ([a-z]+)`?$", text, re.MULTILINE)) <= targets


def test_the_config_of_the_page_of_workspaces_loads(tmp_path: Path) -> None:
    [config] = snippets(ROOT / "docs/workspaces.md", "yaml")
    (tmp_path / "retinue.yaml").write_text(config)
    project = load_project(tmp_path, config=tmp_path / "retinue.yaml")
    [coder] = [profile for profile in project.profiles if profile.name == "coder"]
    assert (coder.workspace, project.settings.workspace_setup) == ("worktree", "npm ci")


def test_the_architecture_page_lists_the_packages_in_the_linter_s_order() -> None:
    """The page cannot drift from the import rules: same packages, same order."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    [layers] = [each["layers"] for each in contracts if each["name"] == "Packages import downwards only"]
    in_linter = [set(re.findall(r"\w+", layer)) for layer in layers]
    page = (ROOT / "docs/architecture.md").read_text()
    table = page[page.index("| package | contents |") : page.index("## One run")]
    on_page = [set(re.findall(r"`(\w+)`", row.split("|")[1])) for row in table.splitlines()[2:] if row]
    assert on_page == in_linter


def test_the_help_of_open_describes_every_option_and_mode() -> None:
    text = inspect.getdoc(library.open)
    assert text is not None
    described = set(re.findall(r"`(\w+)`", text))
    assert {*inspect.signature(library.open).parameters, *MODES} - described == set()
