"""Tests of access to the control server: routes, methods, tokens, Host and Origin, and malformed bodies."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from retinue.http import server
from retinue.protocol.control import ROUTES
from tests.control.loopback.kit import HANG, Response, knock, request, serve_supervisor
from tests.gates import hurry, until, wait_for_answer

GETS = ["/v1/trees", "/v1/pending", "/v1/watch"]
POSTS = ["/v1/cancel", "/v1/send", "/v1/answer"]
METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "FOO"]
NOWHERE = ["/", "/v1", "/v1/", "/v1/cancel/", "/v2/trees", "/v1/../v1/trees", "/V1/trees", "/v1/%74rees", "//v1/trees"]


async def test_every_route_and_method_with_and_without_a_token(tmp_path: Path) -> None:
    async with serve_supervisor(tmp_path) as h:
        run = h.run({"main": [HANG]})
        good = {"cancel": {"tree": "x"}, "send": {"tree": "x", "run": 0, "text": "x"}}
        good["answer"] = {"approval_id": "x", "decision": {"type": "allow"}}
        token = h.server.address.token
        wrong = (
            None,
            "",
            "Bearer",
            "Bearer wrong",
            f"Bearer {token}x",
            f"Bearer {token[:-1]}",
            f"Basic {token}",
            token,
        )
        for path in [*GETS, *POSTS, *NOWHERE]:
            for method in METHODS:
                for token in wrong:
                    refused = await request(h.server, method, path, Authorization=token)
                    assert refused.status == 401, (path, method, token)
                body = good.get(path.rpartition("/")[2], {})
                query = "?tree=nowhere" if path == "/v1/watch" else ""
                status = (await request(h.server, method, path + query, body)).status
                if path in NOWHERE:
                    expected = 404
                elif method != ("GET" if path in GETS else "POST"):
                    expected = 405
                else:
                    expected = 404 if path == "/v1/watch" else 200
                assert status == expected, (path, method)
        assert not run.ending


@pytest.mark.parametrize("path", [route for route, command in ROUTES.items() if not command.reads])
async def test_a_post_takes_no_parameters_in_its_address(tmp_path: Path, path: str) -> None:
    async with serve_supervisor(tmp_path) as h:
        refused = await request(h.server, "POST", f"{path}?tree=t1")
        assert refused.status == 400
        assert refused.error == "this route takes no parameters in its address"


async def test_the_watch_of_questions_needs_a_token_and_is_a_get(tmp_path: Path) -> None:
    async with serve_supervisor(tmp_path) as h:
        for method in METHODS:
            assert (await request(h.server, method, "/v1/questions", Authorization="Bearer wrong")).status == 401
            if method != "GET":
                assert (await request(h.server, method, "/v1/questions")).status == 405
        foreign = await request(h.server, "GET", "/v1/questions", Origin="http://example.com")
        assert foreign.status == 403


async def test_405_names_what_is_allowed(tmp_path: Path) -> None:
    async with serve_supervisor(tmp_path) as h:
        assert (await request(h.server, "GET", "/v1/cancel")).headers["Allow"] == "POST"
        assert (await request(h.server, "POST", "/v1/trees")).headers["Allow"] == "GET"
        assert (await request(h.server, "GET", "/v1/trees", Authorization=None)).headers["WWW-Authenticate"] == "Bearer"


@pytest.mark.parametrize("path", [*GETS, *POSTS, "/nowhere"])
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS", "DELETE"])
async def test_a_foreign_host_or_origin_is_refused_first(tmp_path: Path, path: str, method: str) -> None:
    """Before the token, the route or the body are looked at: the body here never comes."""
    async with serve_supervisor(tmp_path) as h:
        port = h.server.address.port
        foreign = (
            None,
            "",
            "127.0.0.1",
            f"127.0.0.1:{port + 1}",
            f"evil.example:{port}",
            f"127.0.0.1:{port}.evil.example",
        )
        for host in foreign:
            refused = await request(h.server, method, path, Host=host, Content_Length="1000")
            assert refused.status == (400 if host is None else 403), host  # HTTP/1.1 requires one
        for origin in ("null", "", "http://evil.example", f"https://127.0.0.1:{port}", f"http://evil.example:{port}"):
            answer = await request(h.server, method, path, Origin=origin, Content_Length="1000")
            assert answer.status == 403, origin
            assert "Access-Control-Allow-Origin" not in answer.headers


async def test_our_own_host_and_origin_are_let_in(tmp_path: Path) -> None:
    async with serve_supervisor(tmp_path) as h:
        port = h.server.address.port
        for host in (f"127.0.0.1:{port}", f"localhost:{port}"):
            assert (await request(h.server, "GET", "/v1/trees", Host=host, Origin=f"http://{host}")).status == 200


async def test_gets_change_nothing(tmp_path: Path) -> None:
    async with serve_supervisor(tmp_path) as h:
        run = h.run({"main": [HANG]})
        tree = h.supervisor.trees[run.ref.tree]
        await until(lambda: run.view.turns)
        before = tree.seq
        for path in ("/v1/trees", "/v1/pending", f"/v1/pending?tree={tree.id}"):
            first, second = [await request(h.server, "GET", path) for _ in range(2)]
            assert first.body == second.body
        assert tree.seq == before
        [process] = json.loads((await request(h.server, "GET", "/v1/trees")).body)
        [live] = process["runs"]
        assert (live["path"], live["state"]) == ("/main", "running")
        assert "token" not in json.dumps(process)


BAD_BODIES = {
    b"": "not JSON",
    b"{": "not JSON",
    b"null": "Expected `object`",
    b"[]": "Expected `object`",
    b'"x"': "Expected `object`",
    b"{}": "missing required field `tree`",
    b'{"tree": 1}': "Expected `str`, got `int` - at `$.tree`",
    b'{"tree": "x", "run": "0"}': "at `$.run`",
    b'{"tree": "x", "run": 1.5}': "at `$.run`",
    b'{"tree": "x", "run": true}': "at `$.run`",
    b'{"tree": "x", "run": null}': "at `$.run`",
    b'{"tree": "x", "runn": 0}': "unknown field `runn`",
    b'{"tree": "x", "tree": "y"}': "the key 'tree' is given twice",
    b'{"tree": "x", "run": NaN}': "NaN is not JSON",
    b'{"tree": "x", "run": -Infinity}': "-Infinity is not JSON",
    b'{"tree": "x", "run": ' + b"9" * 5000 + b"}": "more than 18 digits",
    b'{"tree": "x", "run": 1e999}': "1e999 is too large",
    b'\xef\xbb\xbf{"tree": "x"}': "not JSON",
    b'{"tree": "\xff"}': "not UTF-8",
    b'{"tree": "\\ud800"}': "half of a character",
    b'{"tree": ' + b"[" * 100_000 + b"]" * 100_000 + b"}": "nested too deeply",
    b'{"tree": ' + b"[" * 500 + b"]" * 500 + b"}": "nested too deeply",
    b'{"tree": "x"} {"tree": "y"}': "not JSON",
}


@pytest.mark.parametrize("body", BAD_BODIES, ids=lambda body: repr(body[:24]))
async def test_a_bad_body_is_a_clear_error_and_the_server_goes_on(tmp_path: Path, body: bytes) -> None:
    async with serve_supervisor(tmp_path) as h:
        answer = await request(h.server, "POST", "/v1/cancel", body)
        assert answer.status == 400
        assert BAD_BODIES[body] in answer.error
        assert (await request(h.server, "GET", "/v1/trees")).status == 200


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/send", {"tree": "x", "run": 0}, "text"),
        ("/v1/send", {"tree": "x", "run": 0, "text": 5}, "$.text"),
        ("/v1/send", {"tree": "x", "run": 0, "text": ""}, "empty"),
        ("/v1/answer", {"approval_id": "x"}, "decision"),
        ("/v1/answer", {"approval_id": "x", "decision": "allow"}, "$.decision"),
        ("/v1/answer", {"approval_id": "x", "decision": {"type": "perhaps"}}, "perhaps"),
        ("/v1/answer", {"approval_id": "x", "decision": {"type": "deny", "reason": 1}}, "$.decision.reason"),
    ],
)
async def test_what_is_wrong_is_named(tmp_path: Path, path: str, body: Any, field: str) -> None:
    async with serve_supervisor(tmp_path) as h:
        answer = await request(h.server, "POST", path, body)
        assert answer.status == 400
        assert field in answer.error


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Content_Length": None}, 411),
        ({"Content_Length": None, "Transfer_Encoding": "chunked"}, 411),
        ({"Transfer_Encoding": "chunked"}, 411),
        ({"Content_Length": "-1"}, 400),
        ({"Content_Length": "+2"}, 400),
        ({"Content_Length": "0x2"}, 400),
        ({"Content_Length": "²"}, 400),
        ({"Content_Length": "9" * 40}, 400),
        ({"Content_Length": str(server.MAX_BODY_BYTES + 1)}, 413),
        ({"Content_Length": "999999999999"}, 413),
        ({"Content_Encoding": "gzip"}, 415),
        ({"Content_Type": "text/plain"}, 415),
        ({"Content_Type": None}, 415),
    ],
)
async def test_bodies_that_are_not_read(tmp_path: Path, headers: dict[str, str | None], status: int) -> None:
    async with serve_supervisor(tmp_path) as h:
        assert (await request(h.server, "POST", "/v1/cancel", {"tree": "x"}, **headers)).status == status


async def test_a_body_over_the_limit_gets_its_answer_though_it_is_still_coming(tmp_path: Path) -> None:
    async with serve_supervisor(tmp_path) as h:
        answer = await request(h.server, "POST", "/v1/cancel", b"x" * (3 * server.MAX_BODY_BYTES))
        assert answer.status == 413


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"\r\n\r\n", 400),
        (b"hello\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\r\n\r\n", 400),
        (b"GET /v1/trees HTTP/2.0\r\n\r\n", 400),
        (b"GET /v1/trees\r\n\r\n", 400),
        (b"GET http://127.0.0.1/v1/trees HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"GET /v1/trees HTTP/1.1\r\nHost : x\r\n\r\n", 400),
        (b"GET /v1/trees HTTP/1.1\r\nHost: x\r\n folded\r\n\r\n", 400),
        (b"GET /v1/trees HTTP/1.1\r\nHost: x\nEvil: y\r\n\r\n", 400),
        (b"GET /v1/trees HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n", 400),
        (b"GET /v1/\x00trees HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"GET /v1/trees?a=1&a=2 HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"GET /v1/trees?%ff HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"GET /v1/trees HTTP/1.1\r\nHost: x\r\nX: " + b"x" * server.MAX_HEAD_BYTES + b"\r\n\r\n", 431),
        (b"GET /v1/trees HTTP/1.1\r\n\r\n", 400),
        (b"GET /v1/trees HTTP/1.1\r\nHost: x\r\nX: 1\r\nX: 2\r\n\r\n", 400),
        (b"GET /v1/trees HTTP/1.1\r\nHost: x\r\n\r\n", 403),
        (b"GET /v1/trees HTTP/1.0\r\n\r\n", 403),
    ],
)
async def test_what_is_no_request_at_all(tmp_path: Path, data: bytes, status: int) -> None:
    async with serve_supervisor(tmp_path) as h:
        assert (await knock(h.server.address.port, data)).status == status
        assert (await request(h.server, "GET", "/v1/trees")).status == 200


async def test_slow_heads_and_bodies_are_not_waited_for(tmp_path: Path) -> None:
    async with serve_supervisor(tmp_path) as h:
        assert (await hurry(knock(h.server.address.port, b"GET /v1/tr"), server.READ_SECONDS)).status == 408
        slow = request(h.server, "POST", "/v1/cancel", {"tree": "x"}, Content_Length="1000")
        assert (await hurry(slow, server.READ_SECONDS)).status == 408
        head = b"POST /v1/cancel HTTP/1.1\r\nHost: 127.0.0.1:%d\r\n" % h.server.address.port
        rest = f"Authorization: Bearer {h.server.address.token}\r\nContent-Type: application/json\r\n".encode()
        short = await knock(h.server.address.port, head + rest + b"Content-Length: 50\r\n\r\n{}", eof=True)
        assert (short.status, "shorter" in short.error) == (400, True)


async def test_one_who_says_nothing_or_hangs_up_is_nobody(tmp_path: Path) -> None:
    async with serve_supervisor(tmp_path) as h:
        for data in (b"", b"GET"):
            _, writer = await asyncio.open_connection("127.0.0.1", h.server.address.port)
            writer.write(data)
            writer.close()
        assert (await request(h.server, "GET", "/v1/trees")).status == 200


@pytest.mark.parametrize(
    ("query", "status"),
    [
        ("", 400),
        ("?tree=", 400),
        ("?tree=nowhere", 404),
        ("?tree=../../etc/passwd", 404),
        ("?tree=%00", 404),
        ("?tree=x&after=-1", 400),
        ("?tree=x&after=%C2%B2", 400),
        ("?tree=x&after=" + "9" * 400, 400),
        ("?tree=x&deltas=yes", 400),
        ("?tree=x&sudo=1", 400),
    ],
)
async def test_a_watch_that_cannot_be(tmp_path: Path, query: str, status: int) -> None:
    async with serve_supervisor(tmp_path) as h:
        answer: Response = await request(h.server, "GET", f"/v1/watch{query}")
        assert (answer.status, bool(answer.error)) == (status, True)


async def test_too_many_connections_are_told_so(tmp_path: Path) -> None:
    async with serve_supervisor(tmp_path) as h:
        waiting = [await asyncio.open_connection("127.0.0.1", h.server.address.port) for _ in range(256)]
        await asyncio.sleep(0)
        assert (await request(h.server, "GET", "/v1/trees")).status == 503
        for _, writer in waiting:
            writer.close()

        async def is_served() -> bool:
            return (await request(h.server, "GET", "/v1/trees")).status == 200

        assert await wait_for_answer(is_served)
