"""Tests of one code mode program in a real process: its output, the results of its calls, and its end."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from retinue.core.errors import ToolError
from retinue.core.events import ToolCall, ToolResult
from retinue.core.limits import INLINE_BYTES
from retinue.tools.code_mode import ExecutePython
from tests.supervisor.tree.kit import bodies
from tests.tools.code_mode.kit import NAME, TOOLS, forecast, run, served
from tests.tools.folders import make_folders, preview


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("print(1 + 1)", "2\n"),
        ("1 + 1", "2\n"),
        ("x = 3\nx * 'ab'", "'ababab'\n"),
        ("None", ""),
        ("for n in range(2): print(n)", "0\n1\n"),
        ("import asyncio\nawait asyncio.sleep(0)\n'after'", "'after'\n"),
        ("import asyncio\nasync def main():\n    return 7\nasyncio.run(main())", "7\n"),
        ("if __name__ == '__main__':\n    print(__name__)", "__main__\n"),
        ("import sys\nprint('out')\nprint('err', file=sys.stderr)\nprint('more')", "out\nerr\nmore\n"),
        ("print('\\ud800 ä')", "? ä\n"),
        ("import sys\nsys.exit(3)", "[exit code 3]"),
        ("import sys\nsys.exit('no good')", "no good\n[exit code 1]"),
        ("import os\nos.kill(os.getpid(), 9)", "[exit code 137]"),
        ("input()", "EOFError: EOF when reading a line\n[exit code 1]"),
        ("from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int\nimport pickle\n"
         "pickle.loads(pickle.dumps(P(3)))", "P(x=3)\n"),
    ],
)  # fmt: skip
async def test_what_it_prints_and_its_last_value_are_its_output(code: str, text: str) -> None:
    given, result, _ = await run(code)
    assert given.endswith(text)
    assert given == text or given.startswith("Traceback")
    assert result.status == "done"


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("x = = 1", '  File "program.py", line 1\n    x = = 1\n        ^\nSyntaxError: invalid syntax\n'),
        ("print('a')\nif x\n    y", "  File \"program.py\", line 2\n    if x\n        ^\nSyntaxError: expected ':'\n"),
        (
            "import json\ndef load(text):\n    return json.loads(text)\nload('[')",
            "Traceback (most recent call last):\n  File \"program.py\", line 4, in <module>\n    load('[')\n"
            '  File "program.py", line 3, in load\n    return json.loads(text)\n           ^^^^^^^^^^^^^^^^\n'
            "json.decoder.JSONDecodeError: Expecting value: line 1 column 2 (char 1)\n",
        ),
        (
            "from tools import weather\nawait weather.broken('Rome')",
            'Traceback (most recent call last):\n  File "program.py", line 2, in <module>\n'
            "    await weather.broken('Rome')\ntools.ToolError: ValueError: no station in Rome\n",
        ),
        (
            "from tools import weather\nawait weather.forecast(town='Rome')",
            'Traceback (most recent call last):\n  File "program.py", line 2, in <module>\n'
            "    await weather.forecast(town='Rome')\n          ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^\n"
            "TypeError: forecast() got an unexpected keyword argument 'town'\n",
        ),
    ],
)
async def test_an_error_is_shown_with_the_lines_of_the_program_only(code: str, text: str) -> None:
    given, _, _ = await run(code)
    assert given == f"{text}[exit code 1]"


async def test_errors_that_have_others_in_them_are_trimmed_all_the_same() -> None:
    code = """
import asyncio
from tools import weather
async def both():
    async with asyncio.TaskGroup() as group:
        group.create_task(weather.broken("Rome"))
try:
    await both()
except* Exception as errors:
    raise KeyError("city") from errors
"""
    given, _, _ = await run(code)
    assert "no station in Rome" in given
    assert "KeyError: 'city'" in given
    assert {line.split('"')[1] for line in given.splitlines() if 'File "' in line} == {"program.py"}


async def test_a_tool_gives_its_data_its_text_or_an_error() -> None:
    code = """
from tools import ToolError, weather
one = await weather.forecast("Rome", days=2)
print(type(one).__name__, one["degrees"], await weather.report(city="Oslo"))
try:
    await weather.broken("Bern")
except ToolError as error:
    print(error)
"""
    given, _, events = await run(code)
    assert given == "dict 8 fine in Oslo\nValueError: no station in Bern\n"
    calls = bodies(events, ToolCall)[1:]
    assert [(call.name, call.args) for call in calls] == [
        ("mcp__weather__forecast", {"city": "Rome", "days": 2}),
        ("mcp__weather__report", {"city": "Oslo"}),
        ("mcp__weather__broken", {"city": "Bern"}),
    ]


async def test_a_result_that_was_wrapped_is_unwrapped_where_it_is_as_it_was_said() -> None:
    def wrapped(good: bool) -> dict[str, int]:
        """Keeps its word, or not."""
        return {"result": 3} if good else {"other": 4}

    output = {"type": "object", "properties": {"result": {"type": "integer"}}, "required": ["result"]}
    code = "from tools import weather\nprint(await weather.wrapped(True), await weather.wrapped(False))"
    given, _, _ = await run(code, tools=[served(wrapped, output=output)])
    assert given == "3 {'other': 4}\n"


async def test_calls_are_made_at_once() -> None:
    """Each waits until all have come."""
    here = 0
    all_here = asyncio.Event()

    async def meet(name: str) -> int:
        """Waits for ten."""
        nonlocal here
        here += 1
        if here == 10:
            all_here.set()
        await all_here.wait()
        return here

    code = """
import asyncio
from tools import weather
print(await asyncio.gather(*(weather.meet(str(n)) for n in range(10))))
"""
    given, _, events = await run(code, tools=[served(meet)])
    assert given == f"{[10] * 10}\n"
    order = [type(event.body) for event in events if isinstance(event.body, ToolCall | ToolResult)]
    assert order == [ToolCall] * 11 + [ToolResult] * 11


async def test_a_program_can_read_what_it_can_call() -> None:
    code = """
import inspect
import tools
from tools import weather
help(weather.forecast)
print(inspect.signature(weather.forecast), dir(tools.weather) == dir(weather), tools.__all__)
print(inspect.getsource(weather.report))
tools.sky
"""
    given, _, _ = await run(code)
    assert "async forecast(city: 'str', days: 'int' = 1) -> 'Any'\n    The weather of the next days." in given
    assert "(city: 'str', days: 'int' = 1) -> 'Any' True ['weather', 'ToolError']" in given
    assert "return await _call('mcp__weather__report', {'city': city})" in given
    assert "AttributeError: module 'tools' has no 'sky'; available: weather\n" in given


@pytest.mark.parametrize(
    "name", ["shell", "spawn_subagents", NAME, "mcp__weather__other", "plain", "read", "x" * 10_000]
)
async def test_only_tools_of_the_runs_servers_can_be_called(name: str) -> None:
    """Whatever a program sends: a name of another tool of the run is refused, and nothing is written of it."""

    def plain() -> str:
        """A tool of no server."""
        return "ran"

    code = f"""
import tools
try:
    await tools._call({name!r}, {{}})
except tools.ToolError as error:
    print(str(error)[:30], len(str(error)) < 300)
"""
    own = served(plain, server="")
    given, _, events = await run(code, tools=["shell", "read", "spawn_subagents", own, *TOOLS])
    assert given.startswith(f"There is no tool '{name[:12]}")
    assert given.endswith(" True\n")
    assert [call.name for call in bodies(events, ToolCall)] == [NAME]


async def test_its_environment_and_descriptors_are_those_of_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENAI_API_KEY", "PYTHONPATH", "PYTHONSTARTUP", "PYTHONWARNINGS"):
        monkeypatch.setenv(name, "secret")
    code = """
import os, site, subprocess, sys
print("secret" in str(os.environ), os.environ["RETINUE_RUN"], sys.flags.isolated, site.ENABLE_USER_SITE)
print([fd for fd in range(3, 256) if os.path.exists(f"/proc/self/fd/{fd}")])
print(subprocess.run(["ls", "/proc/self/fd"], capture_output=True, text=True).stdout.split())
"""
    given, _, _ = await run(code)
    first, second, third = given.splitlines()
    assert first == "False /main 1 False"
    assert len(second.split(",")) == 1  # the channel
    assert third == "['0', '1', '2', '3']"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({}, "missing 'code'"),
        ({"code": ["x"]}, "'code' must be a string"),
        ({"code": " \n"}, "'code' is empty"),
        ({"code": "x" * 300_000}, "'code' is longer than 262144 bytes"),
        ({"code": "x", "executionTimeout": 0}, "'executionTimeout' must be more than 0"),
        ({"code": "x", "executionTimeout": "9"}, "'executionTimeout' must be a number"),
    ],
)
def test_it_names_the_argument_that_is_wrong(tmp_path: Path, args: dict[str, Any], words: str) -> None:
    with pytest.raises(ToolError, match=f"^{NAME}: {words}"):
        preview(ExecutePython(), make_folders(tmp_path), **args)


def test_a_person_sees_the_program_and_what_would_hide_in_it(tmp_path: Path) -> None:
    shown = preview(ExecutePython(), make_folders(tmp_path), code="print(1)\n# \x1b[2J\u202e")
    assert shown == "print(1)\n# \\x1b[2J\\u202e"


async def test_arguments_that_are_no_json_are_the_programs_own_error() -> None:
    code = """
from tools import weather
for city in (object(), float("nan"), "\\ud800"):
    try:
        await weather.report(city)
    except Exception as error:
        print(type(error).__name__)
"""
    given, _, events = await run(code)
    assert given == "TypeError\nValueError\nUnicodeEncodeError\n"
    assert len(bodies(events, ToolCall)) == 1


async def test_arguments_that_are_nested_without_end_are_refused() -> None:
    code = """
from tools import ToolError, weather
deep = []
for _ in range(200):
    deep = [deep]
try:
    await weather.report(deep)
except ToolError as error:
    print(error)
"""
    given, _, events = await run(code)
    assert given == "Arguments can be nested 64 levels deep.\n"
    assert len(bodies(events, ToolCall)) == 1


async def test_a_result_is_whole_in_the_program_and_cut_in_the_log(tmp_path: Path) -> None:
    def long(size: int) -> str:
        """So many letters."""
        return "x" * size

    code = """
from tools import ToolError, weather
print(len(await weather.long(1_000_000)))
try:
    await weather.long(3_000_000)
except ToolError as error:
    print(error)
"""
    given, _, events = await run(code, tools=[served(long)], path=tmp_path / ".retinue")
    assert given == "1000000\nThe result of mcp__weather__long is 3000002 bytes; a program can be given 2097152.\n"
    first = bodies(events, ToolResult)[0]
    assert len(first.text) <= INLINE_BYTES
    assert Path(first.file).stat().st_size == 1_000_000


async def test_a_program_has_an_end_to_its_calls() -> None:
    code = """
import asyncio
from tools import ToolError, weather
done = await asyncio.gather(*(weather.forecast(str(n)) for n in range(1003)), return_exceptions=True)
print(sum(isinstance(each, dict) for each in done), {str(each) for each in done if isinstance(each, ToolError)})
"""
    given, _, events = await run(code)
    assert given == "1000 {'A program can make 1000 calls, and this one has made them.'}\n"
    assert len(bodies(events, ToolCall)) == 1001


async def test_it_starts_light() -> None:
    """Nothing of ours, and asyncio only where there is something to await."""
    code = "import sys\nprint([name for name in ('asyncio', 'typing', 'retinue', 'msgspec') if name in sys.modules])"
    given, _, _ = await run(code, tools=[served(forecast)])
    assert given == "[]\n"


async def test_no_descriptor_is_left() -> None:
    await run("from tools import weather\nawait weather.report('Rome')")
    before = len(os.listdir("/proc/self/fd"))
    for code in ("from tools import weather\nawait weather.report('Rome')", "1/0", "import sys; sys.exit(2)"):
        await run(code)
    assert len(os.listdir("/proc/self/fd")) <= before
