"""A user's own tests, run by a real pytest in a process of its own, which is forked since most of its time would be
imports."""

from __future__ import annotations

import asyncio
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.surfaces.cli.shell import PROVIDER, SECONDS, environment, find_python

INI = """[pytest]
filterwarnings =
    error
    ignore:Module already imported so cannot be rewritten:pytest.PytestAssertRewriteWarning
    ignore:The configuration option "asyncio_default_fixture_loop_scope":pytest.PytestDeprecationWarning
"""


LOADED = ("pytest", *PROVIDER)


@dataclass
class Done:
    code: int
    out: str


class Suite:
    """A folder with one test module."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "pytest.ini").write_text(INI)

    def write(self, text: str) -> None:
        (self.folder / "test_mine.py").write_text(text)

    def cassette(self, test: str) -> Path:
        return self.folder / "cassettes" / "test_mine" / f"{test}.yaml"

    async def pytest(self, *arguments: str, env: dict[str, str] | None = None, quick: bool = True) -> Done:
        """Run pytest. With `quick` the process is forked, and has only the plugins of these tests."""
        given = environment(PYTEST_DEBUG_TEMPROOT=str(self.folder), **(env or {}))  # or it removes what others left
        command = [sys.executable, "-m", "pytest"]
        if quick:
            command = [*find_python(given, *LOADED), "-m", "pytest", "-p", "retinue.pytest_plugin"]
            given["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
        process = await asyncio.create_subprocess_exec(
            *(*command, "-q", "-p", "no:cacheprovider", *arguments),
            cwd=self.folder,
            env=given,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            async with asyncio.timeout(SECONDS):
                out, _ = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        assert process.returncode is not None
        return Done(process.returncode, out.decode())

    async def passes(self, *arguments: str, env: dict[str, str] | None = None) -> None:
        done = await self.pytest(*arguments, env=env)
        assert done.code == 0, done.out

    async def fails(self, *arguments: str, env: dict[str, str] | None = None, quick: bool = True) -> str:
        done = await self.pytest(*arguments, env=env, quick=quick)
        assert done.code == os.EX_OK + 1, done.out
        return done.out
