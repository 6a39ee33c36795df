"""Figures of the sweeps: each test notes what it went through, and the sums stand at the end of `make soak`."""

from collections import Counter, defaultdict
from collections.abc import Callable

import pytest

PREFIX = "soak:"
Note = Callable[..., None]


@pytest.fixture
def note(request: pytest.FixtureRequest, record_property: Callable[[str, object], None]) -> Note:
    """`note(trees=1, events=90)`: added up by test function."""
    sweep = request.node.originalname

    def add(**figures: float) -> None:
        for name, value in figures.items():
            record_property(f"{PREFIX}{sweep}:{name}", value)

    return add


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if "soak" not in (config.option.markexpr or "") or "not soak" in config.option.markexpr:
        return
    sums: dict[str, Counter[str]] = defaultdict(Counter)
    seconds: Counter[str] = Counter()
    for report in terminalreporter.getreports("passed") + terminalreporter.getreports("failed"):
        names = {key.split(":")[1] for key, _ in report.user_properties if key.startswith(PREFIX)}
        for sweep in names:
            seconds[sweep] += report.duration
            sums[sweep]["tests"] += 1
        for key, value in report.user_properties:
            if key.startswith(PREFIX):
                _, sweep, name = key.split(":")
                sums[sweep][name] += value
    if not sums:
        return
    terminalreporter.section("soak")
    for sweep, figures in sums.items():
        line = ", ".join(f"{value:,.0f} {name.replace('_', ' ')}" for name, value in figures.items())
        terminalreporter.write_line(f"{sweep}: {line}, {seconds[sweep]:.1f} s")
