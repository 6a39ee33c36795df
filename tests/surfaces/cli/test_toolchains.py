"""Tests of the test command that `retinue init` proposes for each kind of project."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import pytest

from retinue.config.profiles import parse_definition
from retinue.config.schema import Section
from retinue.config.settings import PROFILE, SETTINGS, parse_settings, settings_schema
from retinue.config.yaml import parse_yaml
from retinue.core.messages import ToolSpec
from retinue.core.rules import Mode
from retinue.supervisor.policy import RulePolicy
from retinue.surfaces.cli.init import ProjectPlan, find_toolchains, render_settings, render_subagent

SHELL = ToolSpec("shell", "", {}, tier="confirm")
CHOICES = [
    (None, (), False),
    ("anthropic:claude-sonnet-5-5", ("make test",), True),
    ("openai:x", ("uv run pytest", "cargo test"), False),
    ('scripted:odd "name": #1.yaml', ("go test ./...",), True),
]


@pytest.mark.parametrize(
    ("files", "tests"),
    [
        ({}, []),
        ({"Makefile": "test: build\n\tx\n"}, ["make test"]),
        ({"Makefile": "test := 1\nbuild:\n"}, []),
        ({"pyproject.toml": "[tool.pytest.ini_options]\n", "uv.lock": ""}, ["uv run pytest"]),
        ({"pyproject.toml": "", "poetry.lock": "", "tests/x.py": ""}, ["poetry run pytest"]),
        ({"pyproject.toml": ""}, []),
        ({"package.json": '{"scripts": {"test": "jest"}}'}, ["npm test"]),
        ({"package.json": '{"scripts": {"test": "jest"}}', "pnpm-lock.yaml": ""}, ["pnpm test"]),
        ({"package.json": '{"scripts": {"test": "x"}}', "bun.lock": ""}, ["bun run test"]),
        ({"package.json": '{"scripts": {"test": "echo \\"Error: no test specified\\" && exit 1"}}'}, []),
        ({"package.json": "[" * 100_000}, []),
        ({"package.json": '{"scripts": ["test"]}'}, []),
        ({"Cargo.toml": "", "go.mod": ""}, ["cargo test", "go test ./..."]),
        ({"pom.xml": "", "gradlew": ""}, ["mvn test", "./gradlew test"]),
    ],
)
def test_the_command_that_tests_a_project(tmp_path: Path, files: dict[str, str], tests: list[str]) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    found = [one.test for one in find_toolchains(tmp_path)]
    assert found == tests
    for test in found:
        text = render_settings(ProjectPlan(model=None, profile="reviewer", tests=[test], allowed=True))
        rules = parse_settings(text, Path("retinue.yaml")).approvals
        policy = RulePolicy(rules, mode="ask", project=str(tmp_path))
        verdicts = [
            policy.judge(SHELL, {"command": command}, primary=True, workspace=str(tmp_path)).what
            for command in (test, f"{test} --anything", f"{test}; rm x", f"{test} > x", "rm x")
        ]
        assert verdicts == ["allow", "ask", "ask", "ask", "ask"]


def test_files_that_are_none_are_passed_over(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "package.json")
    (tmp_path / "Makefile").mkdir()
    assert find_toolchains(tmp_path) == []


@pytest.mark.finding("U2")
@pytest.mark.parametrize("mode", ["ask", "sandboxed"])
@pytest.mark.parametrize(("model", "tests", "allowed"), CHOICES)
def test_about_a_dozen_lines_are_written_and_load(
    model: str | None, tests: tuple[str, ...], allowed: bool, mode: Mode
) -> None:
    text = render_settings(
        ProjectPlan(model=model, profile="reviewer", tests=tests, allowed=allowed, mode=mode, exposed=["/opt/x"])
    )
    assert len(text.splitlines()) <= 15
    assert all(len(line) <= 120 for line in text.splitlines())
    jsonschema.validate(parse_yaml(text, "retinue.yaml").to_plain(), settings_schema())
    settings = parse_settings(text, Path("retinue.yaml"))
    assert (settings.model, settings.approvals.mode) == (model, mode)
    assert [str(rule) for rule in settings.approvals.allow] == [f"shell({test})" for test in tests if allowed]


def test_every_example_of_a_setting_can_be_written() -> None:
    def write_examples(section: Section, margin: str) -> Iterator[str]:
        for name, key in section.settings.items():
            if isinstance(key.kind, Section) and not key.shown_example:
                yield f"{margin}{name}:"
                yield from write_examples(key.kind, margin + "  ")
            elif key.shown_example:
                yield f"{margin}{name}: {key.shown_example}"

    profile = [line for line in write_examples(PROFILE, "    ") if not line.strip().startswith("leaf:")]
    leaf = ["  reader:", "    leaf: true"]  # one that spawns nothing can have no members for what it spawns
    lines = [*write_examples(SETTINGS, ""), "profiles:", "  poet:", *profile, *leaf]
    text = "\n".join(lines)
    assert parse_settings(text, Path("retinue.yaml")).model
    jsonschema.validate(parse_yaml(text, "retinue.yaml").to_plain(), settings_schema())


@pytest.mark.parametrize("tests", [(), ("make test", "pytest")])
def test_the_agent_is_one(tests: tuple[str, ...]) -> None:
    profile = parse_definition(render_subagent("scout-2", tests), "SUBAGENT.md", "x")[1].profile
    assert profile.name == "scout-2"
    assert all(f"`{test}`" in profile.instructions for test in tests)
