"""Everything a provider can do wrong, over a real connection: one typed error each, in one line, without the key."""

from __future__ import annotations

import asyncio
import ssl
from datetime import UTC, datetime
from email.utils import format_datetime
from pathlib import Path

import pytest

from retinue.concurrency import SystemClock
from retinue.core.errors import ConfigError, ModelError, NotFound, StreamCut
from retinue.core.usage import NO_USAGE, Usage
from retinue.models.providers import ProviderModel
from retinue.testing import ManualClock
from tests.gates import pass_time
from tests.models import streams
from tests.models.certificates import self_signed
from tests.models.kit import ADD, CHAT, CLAUDE, GPT, Heard, ask, provider, request, serving
from tests.models.server import KEY, SSE, Answer, Server, environ, refusal

ALL = (CLAUDE, CHAT, GPT)
WHOLE = {
    CLAUDE: streams.anthropic(streams.text("Hel", "lo"), streams.tool("c1", "add", '{"a"', ": 1}"), stop="tool_use"),
    CHAT: streams.chat(content=["Hel", "lo"], calls=[("c1", "add", ['{"a"', ": 1}"])], finish="tool_calls"),
    GPT: streams.responses(streams.message("Hel", "lo"), streams.function("c1", "add", '{"a"', ": 1}")),
}


async def failure(name: str, answer: Answer, **options: object) -> tuple[ModelError, Heard, Server]:
    heard = Heard()
    async with serving(answer) as server, provider(name, **options) as model:
        with pytest.raises(ModelError) as raised:
            await model.complete(request(tools=[ADD]), heard)
    assert "\n" not in str(raised.value)
    assert KEY not in str(raised.value)
    assert len(server.requests) == 1, "the SDK's own retries are off"
    return raised.value, heard, server


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(
    ("status", "transient", "words"),
    [
        (429, True, "Rate limited (429): slow down"),
        (500, True, "Server error (500): slow down"),
        (503, True, "Server error (503): slow down"),
        (529, True, "Server error (529): slow down"),
        (400, False, "Request rejected (400): slow down"),
        (401, False, "Request rejected (401): {provider} does not accept the key: slow down; check {key}"),
        (
            404,
            False,
            "Request rejected (404): {provider} does not know the model '{name}' or its address: slow down; "
            "check its name and {base}",
        ),
        (413, False, "Request rejected (413): slow down"),
    ],
)
async def test_statuses(name: str, status: int, transient: bool, words: str) -> None:
    error, _, _ = await failure(name, refusal(status, "slow down"))
    provider = name.partition(":")[0]
    key = "ANTHROPIC_API_KEY" if provider == "anthropic" else "OPENAI_API_KEY"
    base = key.replace("API_KEY", "BASE_URL")
    words = words.format(provider=provider, key=key, name=name, base=base)
    assert (str(error), error.status, error.transient, error.retry_after) == (words, status, transient, None)
    assert error.usage == NO_USAGE
    assert not isinstance(error, StreamCut)


@pytest.mark.parametrize("name", ALL)
async def test_retry_after(name: str) -> None:
    clock = ManualClock()
    date = format_datetime(datetime.fromtimestamp(clock.wall() + 42, UTC), usegmt=True)
    for header, seconds in (("7", 7.0), ("1.5", 1.5), (date, 42.0), ("soon", None), ("-1", None)):
        error, _, _ = await failure(name, refusal(429, "wait", Retry_After=header), clock=clock)
        assert error.retry_after == seconds
    error, _, _ = await failure(name, refusal(429, "wait", Retry_After="9", Retry_After_Ms="250"), clock=clock)
    assert error.retry_after == 0.25


async def test_money_that_is_spent_is_not_asked_for_again() -> None:
    error, _, _ = await failure(CHAT, refusal(429, "You exceeded your current quota", "insufficient_quota"))
    assert not error.transient
    error, _, _ = await failure(CLAUDE, refusal(429, "no", "rate_limit_error", X_Should_Retry="false"))
    assert not error.transient


async def test_overload_inside_a_stream() -> None:
    began = WHOLE[CLAUDE][:3]
    error, heard, _ = await failure(CLAUDE, Answer([*began, streams.broke("overloaded_error", "Overloaded")]))
    assert (error.status, error.transient, str(error)) == (529, True, "Server error (529): Overloaded")
    assert heard.of("text") == [error.partial] == ["Hel"]
    assert error.usage == Usage(10, 1)


async def test_a_response_that_failed() -> None:
    failed = streams.responses(streams.message("Hel"), status="failed")
    error, _, _ = await failure(GPT, Answer(failed))
    assert (error.partial, error.usage, error.transient) == ("Hel", Usage(10, 7), True)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("ending", ["cut", "whole"])
async def test_a_stream_cut_anywhere_is_never_a_reply(name: str, ending: str) -> None:
    """After every event, by a dropped connection and by a proper end: no call comes of it, ever."""
    last = {CLAUDE: 2, CHAT: 3, GPT: 1}[name]  # from here on the reply is whole
    for count in range(1, len(WHOLE[name]) - last + 1):
        error, heard, _ = await failure(name, Answer(WHOLE[name][:count], ending=ending))  # type: ignore[arg-type]
        assert error.transient
        assert error.partial == "".join(heard.of("text"))
        if error.partial:
            assert isinstance(error, StreamCut)
            assert str(error).startswith("the model's stream ended in the middle of its reply")


async def test_a_cut_inside_an_event() -> None:
    for size in (5, 40, len(WHOLE[CLAUDE][7]) - 1):
        answer = Answer([*WHOLE[CLAUDE][:7], WHOLE[CLAUDE][7][:size]], ending="cut")
        error, _, _ = await failure(CLAUDE, answer)
        assert isinstance(error, StreamCut)
        assert (error.partial, error.usage) == ("Hello", Usage(10, 2))


async def idle_failure(name: str, answer: Answer) -> BaseException:
    """The error after 60 seconds in which nothing came behind the text of this answer."""
    heard = Heard()
    async with serving(answer) as server, provider(name, idle_seconds=60) as model:
        asking = asyncio.create_task(model.complete(request(tools=[ADD]), heard))
        await server.asked(1)
        while answer.chunks and not heard.of("text"):
            await asyncio.sleep(0)
        await pass_time(60)
        with pytest.raises(ModelError) as raised:
            await asking
    return raised.value


@pytest.mark.parametrize("name", ALL)
async def test_an_idle_stream(name: str) -> None:
    error = await idle_failure(name, Answer(WHOLE[name][:4], ending="hang"))
    assert isinstance(error, StreamCut)
    assert str(error).endswith("for 60 s") and error.transient
    silent = await idle_failure(name, Answer(hold=asyncio.Event()))
    assert not isinstance(silent, StreamCut)
    assert str(silent).startswith("nothing came from 127.0.0.1:") and silent.transient


@pytest.mark.parametrize("name", ALL)
async def test_broken_utf8(name: str) -> None:
    answer = Answer([*WHOLE[name][:4], b'event: x\ndata: {"type": "\xff\xfe\xc3"}\n\n', *WHOLE[name][4:]])
    error, _, _ = await failure(name, answer)
    assert error.transient


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("headers", [{"Content-Type": "text/html"}, SSE])
async def test_html_with_status_200(name: str, headers: dict[str, str]) -> None:
    page = b"<!doctype html>\n<html><body>Sign in to the hotel's network</body></html>\n"
    error, _, _ = await failure(name, Answer([page], headers=headers))
    assert "not a model's reply" in str(error)
    assert error.status is None


@pytest.mark.parametrize("name", ALL)
async def test_an_html_error_page(name: str) -> None:
    page = b"<html>\n<head><title>502 Bad Gateway</title></head>\n" + b"<p>nginx</p>\n" * 1000 + b"</html>"
    error, _, _ = await failure(name, Answer([page], 502, {"Content-Type": "text/html"}))
    assert error.status == 502 and error.transient
    assert len(str(error)) < 600


@pytest.mark.finding("U7")
@pytest.mark.parametrize("name", ALL)
async def test_nobody_there(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with Server() as gone:
        port = gone.port
    for variable, value in environ(port).items():
        monkeypatch.setenv(variable, value)
    with pytest.raises(ModelError, match=f"^cannot reach 127.0.0.1:{port}: .*(refused|failed)") as raised:
        await ask(name)
    assert raised.value.transient
    provider = name.partition(":")[0]
    variable = f"{provider.partition('-')[0].upper()}_BASE_URL"
    assert str(raised.value).endswith(f"; check {variable} and that {provider}'s server runs there")


async def test_a_name_that_is_no_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANTHROPIC_BASE_URL", "http://nowhere.invalid")
    monkeypatch.setenv("ANTHROPIC_API_KEY", KEY)
    with pytest.raises(ModelError, match=r"^cannot reach nowhere\.invalid: ") as raised:
        await ask(CLAUDE)
    assert raised.value.transient


async def test_no_tls_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def plain(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(plain, "127.0.0.1", 0)
    async with server:
        monkeypatch.setenv("ANTHROPIC_BASE_URL", f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        monkeypatch.setenv("ANTHROPIC_API_KEY", KEY)
        with pytest.raises(ModelError, match=r"^cannot reach 127\.0\.0\.1:"):
            await ask(CLAUDE)


async def test_a_certificate_nobody_vouches_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking again would not make it better, so nobody does."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(self_signed(tmp_path / "both.pem"))
    server = await asyncio.start_server(lambda _r, w: w.close(), "127.0.0.1", 0, ssl=context)
    async with server:
        port = server.sockets[0].getsockname()[1]
        monkeypatch.setenv("ANTHROPIC_BASE_URL", f"https://127.0.0.1:{port}")
        monkeypatch.setenv("ANTHROPIC_API_KEY", KEY)
        with pytest.raises(ModelError, match="certificate verify failed") as raised:
            await ask(CLAUDE)
    assert not raised.value.transient


async def test_a_provider_that_repeats_the_key() -> None:
    error, _, _ = await failure(CLAUDE, refusal(401, f"invalid x-api-key:\n {KEY} and sk-ant-api03-abcdefghijklmnop"))
    assert "does not accept the key: invalid x-api-key: [secret] and [secret]; check " in str(error)


def test_models_that_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ANTHROPIC_API_KEY", raising=False)
    with pytest.raises(ConfigError, match="ANTHROPIC_API_KEY"):
        ProviderModel(CLAUDE, clock=SystemClock())
    with pytest.raises(NotFound, match="unknown model 'nobody:x'"):
        ProviderModel("nobody:x", clock=SystemClock())
    with pytest.raises(ConfigError, match=r"'cohere:x' needs a package .*install"):
        ProviderModel("cohere:x", clock=SystemClock())
