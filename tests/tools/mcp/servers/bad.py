"""Servers that misbehave, each in a way of its own: `python bad.py WAY FOLDER`, where the way is exits, garbage, hangs,
dies, noisy, endless, asks, half, deep, mixed, flood, packed, nan, extra, nested, lame, unreadable, modern
(unreadable, of 2026-07-28), unlisted, crowd, costly, pings, blank, wide, restless,
nags or bomb.

They speak the protocol by hand, so that they can break it, and count their lives in FOLDER."""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

MODE, FOLDER = sys.argv[1], Path(sys.argv[2])
MODERN = {"resultType": "complete", "ttlMs": 0, "cacheScope": "private"} if MODE == "modern" else {}


def lives() -> int:
    """Count the starts of this server, including the current one."""
    file = FOLDER / f"{MODE}.lives"
    count = len(file.read_text()) + 1 if file.exists() else 1
    file.write_text("x" * count)
    return count


def answer(number: Any, result: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps({"jsonrpc": "2.0", "id": number, "result": result}) + "\n")
    sys.stdout.flush()


def ask(number: str, method: str, params: dict[str, Any]) -> Any:
    """A request of ours, in the older way: nothing says for which call it is."""
    sys.stdout.write(json.dumps({"jsonrpc": "2.0", "id": number, "method": method, "params": params}) + "\n")
    sys.stdout.flush()
    for line in sys.stdin:
        message = json.loads(line)
        if message.get("id") == number:
            return message.get("result", message.get("error"))
    return None


def asked() -> str:
    """Ask a person and a model, and return both answers."""
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    person = ask("e1", "elicitation/create", {"message": os.environ.get("ASKS", "Really?"), "requestedSchema": schema})
    model = ask("s1", "sampling/createMessage", {"messages": [], "maxTokens": 10})
    return json.dumps([person, model])


def tools() -> list[dict[str, Any]]:
    broken = {"type": "object", "properties": {"x": {"type": "no such type"}}}
    one = {"name": "one", "description": "One.", "inputSchema": {"type": "object", "properties": {}}}
    return [one, {"name": "broken", "inputSchema": broken}, {"name": "an.odd/name", "inputSchema": {"type": "object"}}]


def page() -> dict[str, Any]:
    """A page of tools. Each invalid tool stands between valid ones."""
    if MODE == "unlisted":
        return {"tools": {"one": tools()[0]}}
    if MODE == "bomb":
        return {"tools": [[]] * 600_000}
    if MODE == "crowd":
        schema: dict[str, Any] = {"type": "object"}
        wrong = [
            {"name": "large", "inputSchema": {**schema, "required": [0] * 200_000}},
            {"name": "many", "inputSchema": {**schema, "required": [0] * 1000}},
        ]
        icons = {**tools()[0], "icons": [0] * 1000, "outputSchema": {**schema, "required": [0] * 200_000}}
        return {"tools": [*wrong, icons, *([{"name": "again", "inputSchema": schema}] * 1000)]}
    if MODE == "costly":
        schema = {"type": "object", "anyOf": [True] * 20_000}
        again = {"type": "object", "not": {"anyOf": [True] * 2000}}
        heavy = [{"name": f"heavy{number}", "inputSchema": schema} for number in range(8)]
        light = [{"name": f"light{number}", "inputSchema": {**again, "title": str(number)}} for number in range(8)]
        return {"tools": [tools()[0], *light[:1], *heavy, *light[1:]]}
    if MODE not in ("unreadable", "modern"):
        return {"tools": tools()}
    schema = {"type": "object"}
    wrong = [
        {"name": "text", "inputSchema": "no \x1b[31mschema"},
        {"name": "typeless", "inputSchema": {"properties": {}}},
        {"name": "without"},
        {"name": "\x1b[31m" + "long" * 100, "inputSchema": {"type": "\x1b[31marray"}, "title": 5},
        {"name": ["nameless"], "inputSchema": schema},
        "nothing",
    ]
    lists = {"name": "lists", "inputSchema": schema, "outputSchema": {"type": "array"}}  # valid since 2026-07-28
    return {"tools": [tools()[0], *wrong, lists, {"name": "last", "inputSchema": schema}], **MODERN}


def serve(life: int) -> None:
    waiting: list[Any] = []
    for line in sys.stdin:
        message = json.loads(line)
        method, number = message.get("method"), message.get("id")
        if number is None:
            continue
        if method == "initialize":
            if MODE == "noisy":
                print("npm notice: a new version is out")
                sys.stdout.buffer.write(b"\xff\xfe\n")
            about = {"name": MODE, "version": "1"}
            more = {"tools": ["one"]} if MODE == "extra" else {}
            answer(
                number, {"protocolVersion": "2025-11-25", "capabilities": {"tools": {}}, "serverInfo": about, **more}
            )
        elif method == "tools/list":
            if MODE == "restless":
                with (FOLDER / "listings").open("a") as file:
                    file.write("x")
            answer(number, page())
            if MODE == "restless":
                print(json.dumps({"jsonrpc": "2.0", "method": "notifications/tools/list_changed"}), flush=True)
        elif method == "server/discover" and MODE == "modern":
            answer(number, {"supportedVersions": ["2026-07-28"], "capabilities": {"tools": {}}, **MODERN})
        elif method == "tools/call" and MODE == "dies" and life < int(os.environ.get("LIVES", "2")):
            sys.stderr.write("Segmentation fault in libcheese\n")
            os._exit(3)
        elif method == "tools/call" and MODE == "endless":
            while True:
                sys.stdout.write("y" * 65536)
        elif method == "tools/call" and MODE == "half":
            emoji, escaped = "\U0001f600", "\\" + "ud83d"  # a whole one, half of one, and what only looks like it
            answer(number, {"content": [{"type": "text", "text": f"{emoji}|\ud83d|{escaped}"}]})
        elif method == "tools/call" and MODE == "deep":
            nested = "[" * 100_000 + "]" * 100_000
            sys.stdout.write(f'{{"jsonrpc": "2.0", "id": {number}, "result": {{"content": {nested}}}}}\n')
            sys.stdout.flush()
        elif method == "tools/call" and MODE == "mixed":
            image = {"type": "image", "data": "AAAA"}  # without its type
            blocks = [{"type": "text", "text": "before"}, {"type": "hologram", "beam": 1}, image, "odd"]
            answer(number, {"content": [*blocks, {"type": "text", "text": "after"}]})
        elif method == "tools/call" and MODE == "flood":
            odd = {"type": "text", "text": "x", "annotations": {"audience": [0] * 1000}}
            answer(number, {"content": [odd, *([0] * 3000)]})
        elif method == "tools/call" and MODE == "packed":  # more values in a text than a message may have
            text = {"type": "text", "text": f"[{'[],' * 1_000_000}[]]"}
            answer(number, {"content": [text], "structuredContent": {"one": 1, "two": 2}})
        elif method == "tools/call" and MODE == "pings":
            for ping in range(20_000):
                sys.stdout.write(json.dumps({"jsonrpc": "2.0", "id": f"p{ping}", "method": "ping"}) + "\n")
            answer(number, {"content": []})
        elif method == "tools/call" and MODE == "nags":
            schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}}
            said = [
                ask(f"e{nag}", "elicitation/create", {"message": "Really?", "requestedSchema": schema})["action"]
                for nag in range(120)
            ]
            answer(number, {"content": [{"type": "text", "text": " ".join(sorted(set(said)))}]})
        elif method == "tools/call" and MODE == "blank":
            sys.stdout.write("\n" * 3_000_000)
            answer(number, {"content": [{"type": "text", "text": "at last"}]})
        elif method == "tools/call" and MODE == "wide":
            wide: Any = [0] * 100_000
            for _ in range(100):
                wide = [wide]
            answer(number, {"content": [], "structuredContent": {"one": wide, "two": 2}})
        elif method == "tools/call" and MODE == "nan":  # as Python writes it, although it is not JSON
            answer(number, {"content": [], "structuredContent": {"one": float("nan"), "two": float("inf")}})
        elif method == "tools/call" and MODE == "nested":
            nested: list[Any] = []
            for _ in range(int(os.environ["LEVELS"])):
                nested = [nested]
            answer(number, {"content": [], "structuredContent": {"one": nested, "two": life}})
        elif method == "tools/call" and MODE == "extra":  # a result may have fields that MCP does not define
            answer(number, {"content": [{"type": "text", "text": "took effect"}], "isError": False, "tools": []})
        elif method == "tools/call" and MODE == "asks":
            waiting.append(number)
            if len(waiting) == int(os.environ.get("CALLS", "1")):
                said = asked()
                for each in waiting:
                    answer(each, {"content": [{"type": "text", "text": said}]})
        elif method == "tools/call":
            answer(number, {"content": [{"type": "text", "text": f"life {life}"}], **MODERN})
        else:
            error = {"code": -32601, "message": f"no method {method}"}
            sys.stdout.write(json.dumps({"jsonrpc": "2.0", "id": number, "error": error}) + "\n")
            sys.stdout.flush()


def main() -> None:
    life = lives()
    if MODE == "exits":
        sys.exit("cannot find my configuration")
    if MODE == "hangs":
        sys.stderr.write("loading the model\n")
        sys.stderr.flush()
        signal.pause()
    if MODE == "garbage":
        print("Welcome to \x1b[31mthe server!\n" * 10, flush=True)
        signal.pause()
    serve(life)


if __name__ == "__main__":
    main()
