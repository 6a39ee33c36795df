"""The public face: a decision, pinned here."""

import subprocess
import sys

import retinue

NAMES = {
    "Allow", "Approval", "Approver", "ConfigError", "Context", "Criterion", "Deny", "Event", "EventBody", "Limits",
    "Member", "OpenOptions", "Profile", "Result", "Retinue", "RetinueError", "Rounds", "RunFailed", "RunHandle",
    "SpawnRefused", "Status", "Task", "Team", "Telemetry", "ToolError", "Usage", "events", "load_profile", "models",
    "open", "run_sync", "tool",
}  # fmt: skip


def test_the_public_names_are_these() -> None:
    assert set(retinue.__all__) == NAMES == set(dir(retinue))
    assert all(getattr(retinue, name) is not None for name in NAMES)


def test_importing_it_loads_next_to_nothing() -> None:
    code = "import sys, retinue; print([m for m in ('asyncio', 'msgspec', 'apsw', 'yaml') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_a_library_prints_nothing_and_leaves_signals_alone() -> None:
    code = (
        "import signal, retinue\n"
        "from retinue.testing import scripted\n"
        "before = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]\n"
        "retinue.run_sync(retinue.Profile('p', model=scripted({'p': [{'text': 'x'}]})), 'go')\n"
        "assert before == [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (out.stdout, out.stderr) == ("", "")
