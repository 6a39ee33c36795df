"""A rule written into a person's retinue.yaml: all comments and other values are kept."""

from pathlib import Path

import pytest

from retinue.config.edit import add_allowed, set_runtime
from retinue.config.settings import load_settings
from retinue.core.errors import ConfigError
from retinue.surfaces.cli.init import ProjectPlan, render_settings

RULE = 'shell(git commit -m "a: b" [*])'
WORD = '"shell(git commit -m \\"a: b\\" [*])"'


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", "approvals:\n  allow:\n    - W\n"),
        ("model: x  # mine", "model: x  # mine\napprovals:\n  allow:\n    - W\n"),
        ("# only words\n", "# only words\napprovals:\n  allow:\n    - W\n"),
        ("approvals:  # later\nmodel: x\n", "approvals:  # later\n  allow:\n    - W\nmodel: x\n"),
        (
            "approvals:\n    mode: ask # a\nmodel: x\n",
            "approvals:\n    allow:\n      - W\n    mode: ask # a\nmodel: x\n",
        ),
        ("approvals:\n  allow:  # none\n  mode: ask\n", "approvals:\n  allow:  # none\n    - W\n  mode: ask\n"),
        ("approvals:\n  allow:\n  - read # r\n  # end\n", "approvals:\n  allow:\n  - read # r\n  - W\n  # end\n"),
        ("approvals:\n  allow: [read]  # r\n", "approvals:\n  allow: [read, W] # r\n"),
        ("approvals:\n  allow: []\n", "approvals:\n  allow:\n    - W\n"),
        ("approvals: {mode: ask}  # m\n", "approvals: {allow: [W], mode: ask} # m\n"),
        ("approvals: {}\n", "approvals:\n  allow:\n    - W\n"),
        ("approvals:\r\n  allow:\r\n    - read\r\n", "approvals:\r\n  allow:\r\n    - read\r\n    - W\r\n"),
        ("{model: x}\n", "{model: x, approvals: {allow: [W]}}\n"),
        ("approvals:\n  allow:\n    - read", "approvals:\n  allow:\n    - read\n    - W\n"),
    ],
)
def test_a_rule_goes_where_a_person_would_put_it(tmp_path: Path, before: str, after: str) -> None:
    file = tmp_path / "retinue.yaml"
    file.write_bytes(before.encode())
    file.chmod(0o640)
    add_allowed(file, RULE)
    assert file.read_bytes().decode() == after.replace("W", WORD)
    assert str(load_settings(file).approvals.allow[-1]) == RULE
    add_allowed(file, RULE)  # it has it
    assert file.read_bytes().decode() == after.replace("W", WORD)
    assert file.stat().st_mode & 0o777 == 0o640
    assert [entry.name for entry in tmp_path.iterdir()] == ["retinue.yaml"]


def test_every_line_that_init_wrote_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "retinue.yaml"
    text = render_settings(
        ProjectPlan(model="openai:x", profile="reviewer", tests=["make test"], allowed=True, exposed=["/opt/x"])
    )
    file.write_text(text)
    add_allowed(file, "read")
    set_runtime(file, "inherited")
    lines = file.read_text().splitlines()
    added = ['    - "read"', "orchestrator:", "  coordination:", "    subagent_runtime_mode: inherited"]
    assert [line for line in lines if line not in added] == text.splitlines()
    assert lines.index(added[0]) == lines.index("    - shell(make test)") + 1


def test_a_file_is_made_where_there_is_none_and_a_link_is_followed(tmp_path: Path) -> None:
    real = tmp_path / "real.yaml"
    (tmp_path / "retinue.yaml").symlink_to(real)
    add_allowed(tmp_path / "retinue.yaml", "read")
    assert [str(rule) for rule in load_settings(real).approvals.allow] == ["read"]
    assert (tmp_path / "retinue.yaml").is_symlink()


@pytest.mark.parametrize("text", ["approvals: 3\n", "approvals:\n  allow: {}\n", "- a\n", "a: [\n"])
def test_what_cannot_be_changed_safely_is_left_alone(tmp_path: Path, text: str) -> None:
    file = tmp_path / "retinue.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"retinue\.yaml"):
        add_allowed(file, "read")
    assert file.read_text() == text


KEYS = "orchestrator:\n  coordination:\n    subagent_runtime_mode: "


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", f"{KEYS}inherited\n"),
        ("model: x  # mine", f"model: x  # mine\n{KEYS}inherited\n"),
        ("orchestrator:  # o\nmodel: x\n", f"{KEYS.replace(':', ':  # o', 1)}inherited\nmodel: x\n"),
        (f"{KEYS}isolated  # why\nmodel: x\n", f"{KEYS}inherited # why\nmodel: x\n"),
        (
            "orchestrator:\n  coordination:\n    subagent_types: []\n",
            f"{KEYS}inherited\n    subagent_types: []\n",
        ),
    ],
)
def test_where_runs_live_is_written_where_a_person_would_put_it(tmp_path: Path, before: str, after: str) -> None:
    file = tmp_path / "retinue.yaml"
    file.write_text(before)
    set_runtime(file, "inherited")
    assert file.read_text() == after
    assert load_settings(file).coordination.subagent_runtime_mode == "inherited"


def test_where_runs_live_is_left_to_a_person_in_a_file_that_is_hard_to_change(tmp_path: Path) -> None:
    file = tmp_path / "retinue.yaml"
    file.write_text("orchestrator: {coordination: 3}\n")
    with pytest.raises(ConfigError, match="by hand"):
        set_runtime(file, "inherited")
    assert file.read_text() == "orchestrator: {coordination: 3}\n"
