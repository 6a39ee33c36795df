"""Pages with transcripts do not lie: every command runs on a terminal, with a model server on this machine."""

import asyncio
import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.docs.test_docs import ROOT
from tests.docs.transcripts import Reply, TerminalSession, run_page
from tests.models import streams
from tests.models.server import Answer, Conversation
from tests.surfaces.cli.fork_server import start_fork_server
from tests.surfaces.cli.shell import PROVIDER

SHOP = ROOT / "docs/examples/shop"
FIXED = {
    "path": "cart.py",
    "old_string": "sum(prices) - discount",
    "new_string": "sum(prices) * (100 - discount) / 100",
}


def _insert_test(name: str) -> dict[str, str]:
    last = "        self.assertEqual(total([80, 120], 10), 180)\n"
    more = f"\n    def {name}(self):\n        self.assertEqual(total([80, 120], 0), 200)\n"
    return {"path": "test_cart.py", "old_string": last, "new_string": last + more}


ADD = {"path": "cart.py", "old_string": "def total", "new_string": '"""The prices of a cart."""\n\n\ndef total'}
LOOK = streams.tool("t1", "subagent_explorer", json.dumps({"task": "Why does `make test` fail?"}))
ANSWERS = {
    "make test fails": Answer(streams.anthropic(streams.text("The explorer looks first."), LOOK, stop="tool_use")),
    "Why does": streams.called("t2", "shell", {"command": "make test"}),
    "t2": streams.called("t3", "read", {"path": "cart.py"}),
    "t3": streams.said("cart.py:3 subtracts the discount as an amount. The docstring and the test want percent."),
    "t1": streams.called("t4", "edit", FIXED),
    "t4": streams.called("t5", "shell", {"command": "make test"}),
    "t5": streams.said("`total` took the discount as an amount. It takes percent now, and `make test` passes."),
    "add a test": streams.called("t6", "edit", _insert_test("test_that_a_discount_of_zero_changes_nothing")),
    "t6": streams.called("t7", "edit", _insert_test("test_no_discount")),  # after a no
    "t7": streams.said("I added `test_no_discount`."),
    "Add a module docstring": streams.called("t8", "read", {"path": "cart.py"}),
    "t8": Answer(ending="hang"),  # until Ctrl-C
    "Go on.": streams.called("t9", "edit", ADD),
    "t9": streams.said("cart.py has a module docstring now."),
}  # fmt: skip
REPLIES = {
    "retinue init": (Reply("-5-5] ", "\n"), Reply("asking? [Y/n] ", "n\n"), Reply("asking? [Y/n] ", "y\n")),
    'retinue run "make test fails': (Reply("[n]o this", "y"),),
    "retinue apply --yes": (),
    "retinue apply": (Reply("[y/N] ", "y\n"),),
    '"Go on."': (Reply("[n]o this", None),),
    "retinue resume": (Reply("[n]o this", "y"),),
    "retinue continue": (
        Reply("[n]o this", "N"), Reply("reason > ", "shorter, please: test_no_discount\r"), Reply("[n]o this", "y"),
    ),
    'retinue run "Add': (Reply("✓ read(cart.py)", "\x03"), Reply("Cancel what?", "\x03")),
}  # fmt: skip


ADDED = {
    "Add a module docstring": streams.called("t1", "edit", ADD),
    "One line is enough": streams.said("cart.py has a module docstring of one line now."),
    "Write CHANGES.md": Answer(ending="hang"),
}
ANSWERED = {
    "retinue approvals": (Reply("[n]o this", "\x03"),),
    "retinue approve ": (Reply("[y/N] ", "y\n"),),
}


async def run_with_model(
    page: Path, folder: Path, answers: Mapping[str, Answer], replies: Mapping[str, Sequence[Reply]]
) -> None:
    """Run a page as a new user in a copy of the example project, with a key of Anthropic in the shell."""
    home, shop, programs = folder / "home", folder / "home/shop", folder / "home/bin"
    shutil.copytree(SHOP, shop)
    programs.mkdir()
    words = [*start_fork_server().find_python(*PROVIDER), "-m", "retinue"]
    (programs / "retinue").write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
    (programs / "retinue").chmod(0o755)
    person = {"GIT_AUTHOR_NAME": "Ann", "GIT_AUTHOR_EMAIL": "ann@example.com"}
    person |= {name.replace("AUTHOR", "COMMITTER"): value for name, value in person.items()}
    environment = {"HOME": str(home), "PATH": f"{programs}:/usr/bin:/bin", "LANG": "C.UTF-8", "TMPDIR": str(folder)}
    for command in ("git init -q", "git add .", "git commit -qm start"):
        subprocess.run(command.split(), cwd=shop, env={**environment, **person}, check=True)
    async with Conversation(answers) as server:
        names = ("ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY", "NO_PROXY")
        environment |= {name: server.environ()[name] for name in names}
        session = TerminalSession(shop, environment, {str(home): "/home/ann"})
        update = os.environ.get("RETINUE_UPDATE_DOCS") == "1"
        await asyncio.to_thread(run_page, page, session, replies, update=update)


@pytest.mark.finding("U9")
async def test_the_tutorial_shows_what_happens(tmp_path: Path) -> None:
    await run_with_model(ROOT / "docs/tutorial.md", tmp_path, ANSWERS, REPLIES)


@pytest.mark.finding("U9")
async def test_the_page_of_background_work_shows_what_happens(tmp_path: Path) -> None:
    await run_with_model(ROOT / "docs/background.md", tmp_path, ADDED, ANSWERED)
