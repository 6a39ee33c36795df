"""The documentation as a whole: reading order, links, commands, and that every snippet is run somewhere."""

import argparse
import ast
import asyncio
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from retinue.config.profiles import parse_definition
from retinue.config.project import load_project
from retinue.surfaces.cli.main import make_parser
from tests.docs.test_docs import ROOT, snippets
from tests.models import streams
from tests.models.server import Conversation

README = ROOT / "README.md"
GUIDES = sorted((ROOT / "docs").glob("*.md"))
DECISIONS = sorted((ROOT / "docs/decisions").glob("*.md"))
PAGES = [README, ROOT / "CONTRIBUTING.md", *GUIDES, *DECISIONS]
# Pages whose snippets need a setting of their own, and the tests that run them.
RUN_BY = {
    "README.md": "tests/docs/test_pages.py",
    "docs/a2a.md": "tests/surfaces/a2a/test_process.py",
    "docs/approvals.md": "tests/supervisor/approvals/test_decisions.py",
    "docs/code-mode.md": "tests/tools/code_mode/test_docs.py",
    "docs/collector.md": "tests/remote/collector/test_page.py",
    "docs/delegated.md": "tests/docs/test_docs.py",
    "docs/events.md": "tests/docs/test_docs.py",
    "docs/library.md": "tests/docs/test_docs.py",
    "docs/mcp-servers.md": "tests/docs/test_docs.py",
    "docs/own-models.md": "tests/docs/test_docs.py",
    "docs/resume.md": "tests/docs/test_docs.py",
    "docs/sandbox.md": "tests/docs/test_docs.py",
    "docs/settings.md": "tests/docs/test_docs.py",
    "docs/teams.md": "tests/docs/test_docs.py",
    "docs/testing.md": "tests/models/cassettes/test_plugin.py",
    "docs/workspaces.md": "tests/docs/test_docs.py",
}
NO_SETTINGS = {"docs/scripts.md"}  # its YAML is a script, and the tests run the whole file that it shows
TRANSCRIPTS = {"docs/tutorial.md", "docs/background.md"}  # test_transcripts.py runs their commands
LANGUAGES = {"", "console", "markdown", "python", "sh", "yaml"}


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@cache
def find_links(page: Path) -> list[str]:
    """Return the targets of the links outside code, in order."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"\]\(([^)]+)\)", text)


@cache
def find_anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.finding("U9")
def test_the_readme_lists_every_page_once_in_reading_order() -> None:
    text = README.read_text()
    listed = re.findall(r"\]\((docs/[\w-]+\.md)\)", text[text.index("## Documentation") :])
    assert sorted(listed) == [name_of(page) for page in GUIDES]
    assert listed[:3] == ["docs/concepts.md", "docs/tutorial.md", "docs/models.md"]
    assert listed[-3:] == ["docs/security.md", "docs/troubleshooting.md", "docs/architecture.md"]


def test_the_loop_is_three_clicks_from_the_readme() -> None:
    assert "docs/architecture.md" in find_links(README)
    assert "../src/retinue/agent/loop.py" in find_links(ROOT / "docs/architecture.md")


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("agent/loop.py", "run_turns"),
        ("supervisor/spawner.py", "spawn_primary"),
        ("supervisor/spawner.py", "_start_run"),
    ],
)
def test_the_loop_and_spawn_fit_on_a_screen_each(file: str, name: str) -> None:
    tree = ast.parse((ROOT / "src/retinue" / file).read_text())
    functions = ast.FunctionDef | ast.AsyncFunctionDef
    [found] = [node for node in ast.walk(tree) if isinstance(node, functions) and node.name == name]
    assert (found.end_lineno or 0) - found.lineno < 50


def test_the_words_of_the_code_are_classes_of_the_linked_modules() -> None:
    page = ROOT / "docs/architecture.md"
    table = page.read_text().partition("\n## Words of the code\n")[2]
    words = re.findall(r"\[`(\w+)`\]\(([^)]+)\)", table)
    assert words
    for word, link in words:
        assert f"\nclass {word}" in (page.parent / link).read_text(), word


def test_the_followed_run_names_what_the_linked_modules_define() -> None:
    page = ROOT / "docs/architecture.md"
    followed = page.read_text().partition("\n## One run, ")[2].partition("\n## ")[0]
    names = re.findall(r"\[`([\w.]+)`\]\(([^)]+\.py)\)", followed)
    assert {"execute_run", "make_supervisor", "spawn_primary", "run_turns", "run_tool_call"} <= {n for n, _ in names}
    for name, link in names:
        tree = ast.parse((page.parent / link).read_text())
        owner, _, method = name.rpartition(".")
        found = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == owner]
        inside = found[0].body if owner else list(ast.walk(tree))
        defined = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
        assert any(isinstance(node, defined) and node.name == method for node in inside), name


def test_every_decision_is_linked() -> None:
    linked = {
        (page.parent / link).resolve() for page in [*GUIDES, ROOT / "CONTRIBUTING.md"] for link in find_links(page)
    }
    assert set(DECISIONS) <= linked


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_no_link_is_dead(page: Path) -> None:
    for link in find_links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in find_anchors(target), link


@pytest.mark.finding("U9")
@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_snippet_is_run_by_a_test(page: Path, tmp_path: Path) -> None:
    name = name_of(page)
    assert set(re.findall(r"^```(\w*)\n.*?^```$", page.read_text(), re.M | re.S)) <= LANGUAGES
    if name in RUN_BY:
        assert page.name in (ROOT / RUN_BY[name]).read_text()
        return
    for code in snippets(page, "python"):
        done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
    for config in snippets(page, "yaml") if name not in NO_SETTINGS else ():
        (tmp_path / "retinue.yaml").write_text(config)
        assert load_project(tmp_path, config=tmp_path / "retinue.yaml").warnings == ()
    for definition in snippets(page, "markdown"):
        assert parse_definition(definition, name, name)[1].profile.description
    assert not snippets(page, "console") or name in TRANSCRIPTS or find_commands(page)  # their options are checked


def find_commands(page: Path) -> list[list[str]]:
    """Return the words of every `retinue ...` in code, up to a comment."""
    text = page.read_text()
    fences = re.findall(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    blocks = "".join(body for language, body in fences if language in ("", "console", "sh"))
    lines = re.findall(r"^(?:\$ )?(?:\w+=\S+ )*retinue (\w[^#\n|·]*)", blocks, re.MULTILINE)
    inline = re.findall(r"(?<!`)`retinue (\w[^`\n]*)`", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))
    return [re.sub(r'"[^"]*"', "TEXT", line).split() for line in [*lines, *inline]]


@cache
def find_options(*command: str) -> set[str] | None:
    """Return the options of a command; None if there is no such command."""
    _, parsers = make_parser(command[0])
    parser: argparse.ArgumentParser | None = parsers.get(command[0])
    for word in command[1:]:
        assert parser is not None
        below = [one for one in parser._actions if isinstance(one, argparse._SubParsersAction)]
        parser = below[0].choices.get(word) if below else None
    return None if parser is None else {name for action in parser._actions for name in action.option_strings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_command_and_option_in_the_docs_exists(page: Path) -> None:
    for words in find_commands(page):
        if words[0] == "COMMAND":
            continue
        command = tuple(words[:2] if words[0] in ("mcp", "a2a") and len(words) > 1 else words[:1])
        options = find_options(*command)
        assert options is not None, words
        given = {word.rstrip(",;)").partition("=")[0] for word in words if re.match(r"--?[a-z]", word)}
        assert given <= options, words


@pytest.mark.finding("U9")
async def test_the_python_of_the_readme_runs(tmp_path: Path) -> None:
    [code] = snippets(README, "python")
    (tmp_path / "cart.py").write_text("def total(prices): ...\n")
    answers = {
        "Review cart.py": streams.called("t1", "shell", {"command": "make test"}),
        "t1": streams.said("`total` returns nothing."),
    }
    async with Conversation(answers) as server:
        program = tmp_path / "program.py"
        program.write_text(code)
        done = await run_program(program, server.environ())
    lines = done.splitlines()
    assert lines[0] == "1 /main run.spawned"
    assert lines[-1] == "done 34 `total` returns nothing."


async def run_program(program: Path, environment: dict[str, str]) -> str:
    """Run a Python program in its folder and return what it prints."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(program), cwd=program.parent, env={**os.environ, **environment},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    said, errors = await process.communicate()
    assert (process.returncode, errors.decode()) == (0, "")
    return said.decode()


def find_texts() -> list[str]:
    """Return the texts in the code of Retinue, with `...` for what is filled in."""
    texts = []
    for file in sorted((ROOT / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "..." for part in node.values]
                texts.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(re.sub(r"(?<!\{)\{[a-z_]+(?:![a-z])?\}", "...", node.value).replace("{{", "{"))
    return texts


@pytest.mark.finding("U9")
def test_the_messages_of_troubleshooting_are_those_of_the_code() -> None:
    texts = find_texts()
    messages = re.findall(r"^### `(.*)`$", (ROOT / "docs/troubleshooting.md").read_text(), re.MULTILINE)
    assert len(messages) > 40
    missing = [
        message for message in messages if not any(message.strip().removesuffix("...") in text for text in texts)
    ]
    assert missing == []


@pytest.mark.parametrize("page", GUIDES, ids=name_of)
def test_settings_in_the_text_load(page: Path, tmp_path: Path) -> None:
    """`approvals: {mode: sandboxed}` in a sentence or table is as true as a block."""
    for text in re.findall(
        r"`((?:approvals|profiles|resource_limits|network|limits): [{\[][^`]*[}\]])`", page.read_text()
    ):
        if "..." in text or "N}" in text:
            continue  # for the reader to fill in
        config = f"profiles: {{explorer: {{{text}}}}}" if text.startswith("limits") else text
        (tmp_path / "retinue.yaml").write_text(config)
        assert load_project(tmp_path, config=tmp_path / "retinue.yaml").settings, text
