"""The page of code mode does not lie: its program gives what it says, its rules are rules."""

from pathlib import Path

from retinue.config.project import load_project
from tests.docs.test_docs import ROOT, snippets
from tests.tools.code_mode.kit import run

PAGE = ROOT / "docs/code-mode.md"


async def test_the_program_of_the_page_gives_what_the_page_says() -> None:
    [code] = snippets(PAGE, "python")
    given, result, _ = await run(code)
    assert f"```\n{given}```" in PAGE.read_text()
    assert result.tool_count == 6


def test_the_rules_of_the_page_load(tmp_path: Path) -> None:
    [config] = snippets(PAGE, "yaml")
    (tmp_path / "retinue.yaml").write_text(config)
    rules = load_project(tmp_path, config=tmp_path / "retinue.yaml").settings.approvals
    assert [str(rule) for rule in rules.allow] == ["execute_python_code", "mcp__weather__*"]
