"""The hook in conftest.py: async tests really run, with fixtures, parameters and hypothesis."""

import asyncio
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
