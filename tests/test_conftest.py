"""The hook in conftest.py: async tests really run, with fixtures, parameters and hypothesis."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest_plugins = ["pytester"]


@pytest.mark.parametrize("number", [1, 2])
async def test_async_tests_get_a_loop_fixtures_and_parameters(number: int, tmp_path: Path) -> None:
    assert asyncio.get_running_loop().get_debug() is False
    assert number in (1, 2)
    assert tmp_path.is_dir()


@settings(max_examples=5)
@given(st.integers())
async def test_hypothesis_drives_async_tests(number: int) -> None:
    await asyncio.sleep(0)
    assert number == int(str(number))


def test_a_failing_async_test_fails(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(Path(__file__).with_name("conftest.py").read_text(encoding="utf-8"))
    pytester.makepyfile("async def test_it():\n    assert False, 'it ran'\n")
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", "-p", "no:asyncio")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*it ran*"])


@pytest.mark.finding("R10")
def test_ignored_signals_are_restored(tmp_path: Path) -> None:
    """Under `nohup` or in a background shell the suite starts with SIGHUP or SIGINT ignored."""
    (tmp_path / "conftest.py").write_text(Path(__file__).with_name("conftest.py").read_text(encoding="utf-8"))
    (tmp_path / "test_it.py").write_text(
        "import signal\n"
        "def test_it():\n"
        "    assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL\n"
        "    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler\n"
    )
    ignore = f"trap '' {signal.SIGHUP:d} {signal.SIGINT:d}; exec \"$@\""
    pytest_command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    argv = ["sh", "-c", ignore, "sh", *pytest_command]
    env = {**os.environ, "PYTEST_DEBUG_TEMPROOT": str(tmp_path)}  # or it removes what others left
    done = subprocess.run(argv, check=False, capture_output=True, text=True, cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stdout
