"""Fixtures and hooks for all tests: an `async def` test gets its own event loop and a time limit, without a plugin."""

import asyncio
import functools
import gc
import inspect
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

ASYNC_TEST_SECONDS = 300.0  # only ends what hangs: no test may depend on the speed of the machine
OWN_FOLDER = (
    "agent", "build", "control", "crash", "models", "remote", "soak", "supervisor", "telemetry", "tools/subagents"
)  # fmt: skip
settings.register_profile("retinue", deadline=None)  # the machine may be busy; what hangs is ended above
settings.load_profile("retinue")


# The suite starts hundreds of processes: without cached bytecode each would compile the package again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


# A proxy of the user is not for the servers of tests, which are on this machine.
for name in ("NO_PROXY", "no_proxy"):
    os.environ[name] = ",".join(filter(None, (os.environ.get(name), "127.0.0.1,localhost,::1")))


def pytest_configure() -> None:
    """Restore the default signals: `nohup` and background shells ignore some, and child processes inherit that. The
    umask too: where root's sandboxes have a user of their own, it may read what the tests make."""
    os.umask(0o022)
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def pytest_collection_finish() -> None:
    """Exempt what every test module imported from garbage collection: many tests collect, and it never goes away."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def own_config_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Keep a test's trust decisions apart from the user's, in both directions."""
    folder = tmp_path_factory.mktemp("config")
    os.environ["XDG_CONFIG_HOME"] = str(folder)
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))
    return folder


@pytest.fixture(autouse=True)
def own_folder(request: pytest.FixtureRequest) -> None:
    """Let tests of these packages work in a folder of their own: a run in the checkout would look through all of it."""
    if any(request.path.is_relative_to(Path(__file__).parent / name) for name in OWN_FOLDER):
        request.getfixturevalue("monkeypatch").chdir(request.getfixturevalue("tmp_path"))


def run_in_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def sync_test(*args: Any, **kwargs: Any) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(ASYNC_TEST_SECONDS) as limit:
                asyncio.get_running_loop().test_limit = limit  # type: ignore[attr-defined] # for `pass_time`
                await test(*args, **kwargs)

        asyncio.run(bounded(), debug=False)

    return sync_test


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    test = pyfuncitem.obj
    given = getattr(test, "hypothesis", None)
    if given is not None:  # hypothesis calls the inner test itself, once per example
        if inspect.iscoroutinefunction(given.inner_test):
            given.inner_test = run_in_a_loop(given.inner_test)
        return None
    if not inspect.iscoroutinefunction(test):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    run_in_a_loop(test)(**arguments)
    return True
