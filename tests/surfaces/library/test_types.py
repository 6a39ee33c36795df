"""The library as type checkers see it: examples and right uses pass, each wrong use is refused in its line."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

import retinue
from retinue import EventBody, OpenOptions, Profile, events
from retinue.core.events import KINDS
from retinue.core.profiles import ProfileFields

ROOT = Path(__file__).parents[3]
TYPES = Path(__file__).with_name("types")
UNTYPED = ("code-mode", "testing")  # what a model writes, and a test with a fixture
PAGES = ("README.md", *sorted(f"docs/{page.name}" for page in ROOT.glob("docs/*.md") if page.stem not in UNTYPED))
PYRIGHT = Path(sys.prefix) / "peers" / "node_modules" / ".bin" / "pyright"
MARK = "# wrong"
STRICT = {"typeCheckingMode": "strict", "reportUnusedExpression": False, "reportUnusedVariable": False}


def write_examples(folder: Path) -> set[tuple[str, int]]:
    """Write every example to the folder as a file; return the file and line of each wrong use."""
    for page in PAGES:
        found = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
        for number, code in enumerate(found):
            (folder / f"{Path(page).stem.replace('-', '_')}_{number}.py").write_text(code)
    for source in (ROOT / "docs/examples/audit.py", *TYPES.glob("*.py")):
        (folder / source.name).write_text(source.read_text())
    assert {"README_0.py", "library_3.py", "teams_0.py", "rounds_0.py", "hooks_1.py"} <= {
        path.name for path in folder.iterdir()
    }
    lines = (folder / "wrong.py").read_text().splitlines()
    return {("wrong.py", number) for number, line in enumerate(lines, 1) if line.endswith(MARK)}


def run_mypy(folder: Path) -> Iterator[tuple[str, int]]:
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--cache-dir=cache", "--no-pretty", "."]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    for file, line, _ in re.findall(r"^(\S+\.py):(\d+): (error): ", done.stdout, re.MULTILINE):
        yield file, int(line)


def run_pyright(folder: Path) -> Iterator[tuple[str, int]]:
    assert PYRIGHT.exists(), "pyright is not there: run scripts/setup-system"
    (folder / "pyrightconfig.json").write_text(json.dumps(STRICT))
    command = [str(PYRIGHT), "--pythonpath", sys.executable, "--outputjson"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    for found in json.loads(done.stdout)["generalDiagnostics"]:
        if found["severity"] == "error":
            yield Path(found["file"]).name, found["range"]["start"]["line"] + 1


@pytest.mark.finding("U6")
@pytest.mark.parametrize("check", [run_mypy, run_pyright])
def test_type_checkers_accept_the_documented_examples_and_refuse_wrong_uses(check, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    wrong = write_examples(tmp_path)
    assert len(wrong) > 35
    assert set(check(tmp_path)) == wrong


@pytest.mark.finding("U6")
def test_the_union_of_bodies_has_every_kind_and_the_module_every_class() -> None:
    bodies = {*KINDS.values(), events.Unknown}
    assert set(get_args(EventBody)) == bodies
    assert {getattr(events, name) for name in events.__all__} == {*bodies, events.Event, events.Delta, EventBody}


@pytest.mark.finding("U6")
def test_the_typed_options_are_those_there_are() -> None:
    taken = get_type_hints(retinue.open)
    del taken["return"], taken["path"], taken["model"]
    assert get_type_hints(OpenOptions) == taken
    fields = set(Profile.__dataclass_fields__) - {"name", "instructions", "output"}
    assert set(ProfileFields.__annotations__) == fields


def test_the_package_says_that_it_is_typed() -> None:
    assert (Path(retinue.__file__).parent / "py.typed").exists()
