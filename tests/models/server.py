"""A real HTTP server on 127.0.0.1 that sends scripted responses and records its requests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tests.http.loopback import LoopbackServer

KEY = "sk-test-0123456789abcdefghij"
SSE = {"Content-Type": "text/event-stream"}


@dataclass
class Answer:
    """One response. `cut` drops the connection after the chunks, `hang` stays silent after them, `whole` ends the
    stream properly. With `hold`, the response begins when the event is set."""

    chunks: Sequence[bytes] = ()
    status: int = 200
    headers: dict[str, str] = field(default_factory=lambda: dict(SSE))
    ending: Literal["whole", "cut", "hang"] = "whole"
    hold: asyncio.Event | None = None


def refusal(status: int, message: str, kind: str = "error", **headers: str) -> Answer:
    """An error as both APIs send it."""
    body = {"type": "error", "error": {"type": kind, "message": message}}
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Answer([json.dumps(body).encode()], status, {"Content-Type": "application/json", **named})


@dataclass
class Asked:
    """A request of a client."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]


class Server(LoopbackServer):
    """Answers in the order they were given; a request too many gets a 400, and the test sees it in `requests`."""

    def __init__(self, *answers: Answer) -> None:
        super().__init__()
        self.answers = list(answers)
        self.requests: list[Asked] = []
        self.connections = 0
        self._came = asyncio.Condition()

    def environ(self) -> dict[str, str]:
        return environ(self.port)

    async def asked(self, count: int) -> None:
        """Waits until so many requests have come."""
        async with self._came:
            await self._came.wait_for(lambda: len(self.requests) >= count)

    def choose_answer(self, asked: Asked) -> Answer:
        """Return the answer to a request: the next one, whatever is asked."""
        return self.answers.pop(0) if self.answers else refusal(400, "the test has no more answers")

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        while await self._answer(reader, writer):
            pass

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        async with self._came:
            asked = Asked(head[0].split()[1], headers, json.loads(body or b"{}"))
            self.requests.append(asked)
            self._came.notify_all()
        answer = self.choose_answer(asked)
        if answer.hold is not None:
            await answer.hold.wait()
        lines = [f"HTTP/1.1 {answer.status} Scripted", "Transfer-Encoding: chunked"]
        lines += [f"{name}: {value}" for name, value in answer.headers.items()]
        writer.write(("\r\n".join(lines) + "\r\n\r\n").encode())
        for chunk in answer.chunks:
            writer.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))
            await writer.drain()
        if answer.ending == "hang":
            await asyncio.get_running_loop().create_future()
        if answer.ending == "cut":
            return False
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True


class Conversation(Server):
    """Answers by the last thing that Anthropic is told: the id of a tool result, or words of the user. The same answer
    each time."""

    def __init__(self, answers: Mapping[str, Answer]) -> None:
        super().__init__()
        self._by_words = answers

    def choose_answer(self, asked: Asked) -> Answer:
        content = asked.body["messages"][-1]["content"]
        last = content if isinstance(content, str) else content[-1].get("tool_use_id") or content[-1].get("text", "")
        for words, answer in self._by_words.items():
            if words in last:
                return answer
        return refusal(400, f"the test has no answer to {last!r}")


def environ(port: int) -> dict[str, str]:
    """Return the environment variables that lead the SDKs to the server."""
    base = f"http://127.0.0.1:{port}"
    return {
        "ANTHROPIC_BASE_URL": base,
        "ANTHROPIC_API_KEY": KEY,
        "OPENAI_BASE_URL": f"{base}/v1",
        "OPENAI_API_KEY": KEY,
        "OLLAMA_BASE_URL": f"{base}/v1",
        "NO_PROXY": "127.0.0.1",
    }
