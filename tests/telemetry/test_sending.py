"""Tests of telemetry as a user turns it on: over real OTLP/HTTP, and with a collector that fails. Turned off, telemetry
is not imported."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult

import retinue
from retinue import ConfigError, Profile, Telemetry
from retinue.telemetry import observer
from retinue.testing import scripted
from tests.supervisor.tree.kit import spawn, tree
from tests.surfaces.cli.shell import Project, environment
from tests.telemetry.kit import Collector, Memory

AGENTS = {"/main": [spawn({"task": "look"}), {"text": "the answer"}], "subagent": [{"text": "fine"}]}
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


async def run_cli(project: Project, **more: str) -> subprocess.CompletedProcess[str]:
    model = project.script(AGENTS)
    return await asyncio.to_thread(project.retinue, "run", "go", "--yes", "--quiet", "--model", model, **more)


def value(attributes: Any, name: str) -> Any:
    [found] = [attribute.value for attribute in attributes if attribute.key == name]
    return getattr(found, found.WhichOneof("value"))


@pytest.mark.requirement("SDK-55", "SDK-56")
async def test_the_command_sends_over_otlp_what_belongs_to_the_trace_it_was_started_in(tmp_path: Path) -> None:
    async with Collector() as collector:
        done = await run_cli(Project(tmp_path), OTEL_EXPORTER_OTLP_ENDPOINT=collector.url, TRACEPARENT=TRACE)
    assert (done.returncode, done.stdout) == (0, "the answer\n"), done.stderr
    assert "telemetry" not in done.stderr
    names = sorted(span.name for span in collector.spans)
    assert names == ["chat script.yaml"] * 3 + [
        "execute_tool spawn_subagents", "invoke_agent main", "invoke_agent subagent",
    ]  # fmt: skip
    assert {span.trace_id.hex() for span in collector.spans} == {TRACE[3:35]}
    [primary] = [span for span in collector.spans if span.name == "invoke_agent main"]
    assert primary.parent_span_id.hex() == TRACE[36:52]
    assert value(primary.attributes, "gen_ai.provider.name") == "scripted"
    assert value(collector.traces[0].resource_spans[0].resource.attributes, "service.name") == "retinue"
    metrics = collector.metrics[-1].resource_metrics[0].scope_metrics[0].metrics
    assert [metric.name for metric in metrics] == ["retinue.invocations"]


async def test_the_file_turns_it_on_and_off(tmp_path: Path) -> None:
    project = Project(tmp_path)
    async with Collector() as collector:
        (tmp_path / "retinue.yaml").write_text("telemetry: false\n")
        await run_cli(project, OTEL_EXPORTER_OTLP_ENDPOINT=collector.url)
        assert collector.spans == []
        (tmp_path / "retinue.yaml").write_text("telemetry: true\n")
        await run_cli(project, OTEL_EXPORTER_OTLP_ENDPOINT=collector.url, OTEL_SDK_DISABLED="true")
        assert collector.spans == []
        await run_cli(project, OTEL_EXPORTER_OTLP_ENDPOINT=collector.url, OTEL_SERVICE_NAME="mine")
    assert value(collector.traces[0].resource_spans[0].resource.attributes, "service.name") == "mine"


@pytest.mark.parametrize("hangs", [True, False])
async def test_a_collector_that_takes_nothing_costs_a_few_seconds_and_one_line(tmp_path: Path, hangs: bool) -> None:
    async with Collector(hangs=True) as collector:
        url = collector.url if hangs else "http://127.0.0.1:9"
        done = await run_cli(Project(tmp_path), OTEL_EXPORTER_OTLP_ENDPOINT=url)
    assert (done.returncode, done.stdout) == (0, "the answer\n")
    where = url.removeprefix("http://")
    [line] = [line for line in done.stderr.splitlines() if "telemetry" in line]
    assert line == f"warning: telemetry: not all was sent: the collector at {where} did not take it within 3 s"


@pytest.mark.parametrize(
    ("name", "setting", "says"),
    [
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "localhost:4318", "must be an http:// or https:// address"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc", "is not supported; use http/protobuf"),
        ("OTEL_TRACES_EXPORTER", "console", "is not supported; use otlp or none"),
    ],
)
async def test_what_cannot_be_is_one_line(tmp_path: Path, name: str, setting: str, says: str) -> None:
    project = Project(tmp_path)
    (tmp_path / "retinue.yaml").write_text("telemetry: true\n")
    done = await run_cli(project, **{name: setting})
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
    assert name in done.stderr and says in done.stderr


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=False, timeout=200
    )


RUN = """
import sys, retinue
from retinue.testing import scripted
{before}
result = retinue.run_sync(retinue.Profile('p', model=scripted({{'p': [{{'text': 'x'}}]}})), 'go'{more})
print(result.final_response, any(name.startswith('opentelemetry') for name in sys.modules))
"""


@pytest.mark.requirement("SDK-57")
def test_off_it_imports_nothing() -> None:
    done = python(RUN.format(before="", more=""))
    assert (done.stdout, done.stderr) == ("x False\n", "")


def test_without_the_package_one_line_names_the_extra() -> None:
    missing = "sys.modules['opentelemetry.sdk'] = None"
    done = python(RUN.format(before=missing, more=", telemetry=True"))
    packages = "opentelemetry-sdk opentelemetry-exporter-otlp-proto-http"
    assert done.stderr.splitlines()[-1].endswith(
        f"ConfigError: telemetry needs a package that is not installed: {sys.executable} -m pip install {packages}"
    )


@pytest.mark.requirement("SDK-57")
async def test_on_or_off_a_run_does_the_same() -> None:
    def told(events: list[Any]) -> list[Any]:
        return [(event.run, event.kind, event.path) for event in events]

    with_it, without = await tree(AGENTS, telemetry=Memory().telemetry), await tree(AGENTS)
    assert with_it[0].final_response == without[0].final_response
    assert told(with_it[1]) == told(without[1])


async def test_a_program_without_providers_gets_those_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Collector() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        monkeypatch.setenv("OTEL_METRICS_EXPORTER", "none")
        result, _ = await tree(AGENTS, telemetry=True)
    assert result.status == "done"
    assert (len(collector.spans), collector.metrics) == (6, [])


class Broken(SpanExporter):
    """Fails, or with `hang` never comes back."""

    def __init__(self, hang: threading.Event | None = None) -> None:
        self._hang = hang

    def export(self, spans: Any) -> SpanExportResult:
        if self._hang is None:
            raise OSError("the collector is gone")
        self._hang.wait()
        return SpanExportResult.FAILURE


class Raises(SimpleSpanProcessor):
    def on_start(self, span: Any, parent_context: Any = None) -> None:
        raise RuntimeError("a processor with a bug")


@pytest.mark.requirement("SDK-44")
async def test_an_observer_that_fails_is_logged_and_hurts_no_run(caplog: pytest.LogCaptureFixture) -> None:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(Raises(Broken()))
    with caplog.at_level(logging.WARNING, logger="retinue.telemetry"):
        result, _ = await tree(AGENTS, telemetry=Telemetry(provider))
    assert result.status == "done"
    assert "telemetry failed: RuntimeError: a processor with a bug" in caplog.messages


async def test_an_exporter_that_hangs_holds_up_no_run(caplog: pytest.LogCaptureFixture) -> None:
    release = threading.Event()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(Broken(release)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(observer, "FLUSH_SECONDS", 0.2)
        async with retinue.open(mode="yes", telemetry=Telemetry(provider)) as r:
            runs = [r.run(Profile("p", model=scripted({"p": [{"text": "x"}]})), "go") for _ in range(50)]
            assert {result.status for result in await asyncio.gather(*runs)} == {"done"}
    release.set()
    assert [m for m in caplog.messages if m.startswith("not all was sent: the program's own exporter")]


async def test_an_unknown_protocol_is_an_error_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    with pytest.raises(ConfigError, match="grpc"):
        async with retinue.open(telemetry=True):
            pass
