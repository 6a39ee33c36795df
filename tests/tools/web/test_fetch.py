"""Tests of web_fetch: the addresses it may reach, those it never reaches, and its handling of hostile responses."""

from __future__ import annotations

import asyncio
import gzip
import zlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import retinue.tools.web
from retinue import ConfigError, ToolError
from retinue.core.network import AllowedHost, allows_host, canonicalize_name, intersect_hosts, parse_host, parse_hosts
from retinue.tools.dialer import is_public_address
from retinue.tools.web import extract_html_text, extract_text, fetch_page
from tests.gates import pass_time
from tests.tools.web.kit import PUBLIC, Web, answer, moved


async def page(web: Web, url: str, *hosts: str, **options: Any) -> retinue.tools.web.Page:
    return await fetch_page(url, hosts=parse_hosts(hosts or ["*"]), dialer=web, **options)


# Where it may go


@pytest.mark.parametrize(
    ("hosts", "host", "port", "allowed"),
    [
        (["a.com"], "a.com", 443, True), (["a.com"], "a.com", 80, True), (["a.com"], "a.com", 8080, False),
        (["a.com"], "b.a.com", 443, False), (["*.a.com"], "b.a.com", 443, True), (["*.a.com"], "c.b.a.com", 443, True),
        (["*.a.com"], "a.com", 443, False), (["*.a.com"], "xa.com", 443, False), (["a.com:8080"], "a.com", 8080, True),
        (["a.com:8080"], "a.com", 443, False), (["*"], "b.org", 443, True), (["*"], "b.org", 22, False),
        ([], "a.com", 443, False), (["A.Com."], "a.com", 443, True), (["bücher.de"], "xn--bcher-kva.de", 443, True),
        (["*:8443"], "b.org", 8443, True), (["[2606:4700::1]:443"], "2606:4700::1", 443, True),
    ],
)  # fmt: skip
def test_a_list_of_hosts(hosts: list[str], host: str, port: int, allowed: bool) -> None:
    assert allows_host(parse_hosts(hosts), host, port) is allowed


@pytest.mark.parametrize(
    "text", ["", "a b", "http://a.com", "a.com/x", "u@a.com", "*a.com", "a.*.com", "a:0", "a:99999"]
)
def test_what_is_no_host_is_said(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_hosts(["a.com", text])


HOSTS = st.lists(
    st.builds(
        lambda name, port: parse_host(name + port),
        st.sampled_from(["*", "*.a.com", "a.com", "b.a.com", "*.b.a.com", "c.b.a.com", "z.org"]),
        st.sampled_from(["", ":80", ":443", ":8080"]),
    ),
    max_size=4,
).map(tuple)
NAMES = st.sampled_from(["a.com", "b.a.com", "c.b.a.com", "z.org", "y.net"])


@given(HOSTS, HOSTS, NAMES, st.sampled_from([80, 443, 8080]))
def test_what_two_lists_allow_together_is_what_both_allow(
    one: tuple[AllowedHost, ...], other: tuple[AllowedHost, ...], host: str, port: int
) -> None:
    assert allows_host(intersect_hosts(one, other), host, port) == (
        allows_host(one, host, port) and allows_host(other, host, port)
    )


@pytest.mark.parametrize(
    "name", ["2130706433", "0x7f.1", "0177.0.0.1", "127.1", "0x7f000001", "1.2.3.4.5", "a..b", "::1%e"]
)
def test_numbers_in_disguise_are_no_hosts(name: str) -> None:
    assert canonicalize_name(name) is None


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "10.0.0.1", "192.168.1.1", "172.16.0.1", "169.254.169.254", "0.0.0.0", "100.64.0.1", "224.0.0.1",
        "255.255.255.255", "240.0.0.1", "::1", "::", "fe80::1", "fc00::1", "fd00:ec2::254", "fec0::1", "ff02::1",
        "::ffff:127.0.0.1", "::ffff:169.254.169.254", "2002:7f00:1::", "64:ff9b::7f00:1", "2001:0:4136:e378::1",
        "fe80::1%eth0", "not an address", "::127.0.0.1",
    ],
)  # fmt: skip
async def test_no_private_address_is_reached_by_name_or_number(address: str) -> None:
    assert not is_public_address(address)
    async with Web({"/": answer(b"secret")}, sly_example=[PUBLIC, address]) as web:
        with pytest.raises(ToolError, match="not a public address"):
            await page(web, "http://sly.example/")
        assert web.dialled == []


@pytest.mark.parametrize("address", [PUBLIC, "1.1.1.1", "2606:4700:4700::1111", "::ffff:1.1.1.1"])
def test_public_addresses_are_public(address: str) -> None:
    assert is_public_address(address)


@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/passwd", "ftp://a.com/", "gopher://a.com", "http://", "http:///x", "//a.com/", "a.com", "",
        "http://user@a.com/", "http://u:p@a.com/", "http://a.com:99999/", "http://a.com:x/", "http://a.com:22/",
        "http://2130706433/", "http://0x7f.1/", "http://0177.0.0.1/", "http://[::1%25eth0]/", "http://[::1",
        "http://a b/",
        "http://a.com/\r\nX: y", "http://a.com\\@b.com/", "http://evil.org/", "http://a.com.evil.org/", "javascript:1",
        "http://" + "a" * 9000,
    ],
)  # fmt: skip
async def test_urls_that_are_refused_before_anybody_is_asked(url: str) -> None:
    async with Web({}) as web:
        with pytest.raises(ToolError, match=r"^web_fetch: "):
            await page(web, url, "a.com", "127.0.0.1")
        assert (web.resolved, web.dialled) == ([], [])


async def test_the_address_that_was_judged_is_the_one_that_is_dialled() -> None:
    async with Web({"/p?q=%C3%BC": answer(b"hello", "text/plain")}, a_com=["1.1.1.1"]) as web:
        got = await page(web, "http://A.com/p?q=\u00fc#part", "a.com")
    assert (got.body, got.url) == (b"hello", "http://a.com/p?q=%C3%BC")
    assert (web.resolved, web.dialled) == (["a.com"], [("1.1.1.1", 80)])
    [head] = web.asked
    assert head.startswith("GET /p?q=%C3%BC HTTP/1.1\r\nHost: a.com\r\n")
    assert not any(word in head.lower() for word in ("cookie", "authorization", "referer"))


async def test_every_redirect_is_judged_again() -> None:
    pages = {
        "/ok": moved("/there"), "/there": answer(b"here", "text/plain"), "/out": moved("http://evil.org/"),
        "/in": moved("http://inner.a.com/"), "/number": moved("http://169.254.169.254/latest"),
        "/file": moved("file:///x"),
        "/port": moved("//a.com:22/"), "/user": moved("http://u:p@a.com/"), "/loop": moved("/loop"),
    }  # fmt: skip
    async with Web(pages, inner_a_com=["10.0.0.7"]) as web:
        assert (await page(web, "http://a.com/ok", "a.com")).body == b"here"
        for path, says in (
            ("out", "evil.org is not among"), ("in", "leads to 10.0.0.7"), ("number", "169.254.169.254 is not among"),
            ("file", "only http"), ("port", "a.com:22 is not among"), ("user", "user or password"),
            ("loop", "more than 5"),
        ):  # fmt: skip
            with pytest.raises(ToolError, match=says):
                await page(web, f"http://a.com/{path}", "a.com", "inner.a.com")
    assert {address for address, _ in web.dialled} == {PUBLIC}


# What strangers send


async def test_a_page_that_never_ends_and_one_that_unpacks_to_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retinue.tools.web, "BODY_BYTES", 100_000)
    bomb = gzip.compress(b"0" * 50_000_000)
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n"
    pages = {
        "/bomb": answer(bomb, "text/plain", Content_Encoding="gzip"),
        "/long": [head + b"\r\n", *([b"x" * 50_000] * 3), None],
        "/chunked": [
            head + b"Transfer-Encoding: chunked\r\n\r\n",
            *([b"c350\r\n" + b"x" * 50_000 + b"\r\n"] * 3),
            None,
        ],
    }
    async with Web(pages) as web:
        for path in pages:
            got = await page(web, f"http://a.com{path}")
            assert (len(got.body), got.cut) == (100_000, True), path


@pytest.mark.parametrize("pack", ["gzip", "deflate", "raw", ""])
async def test_packed_pages_are_unpacked(pack: str) -> None:
    text = b"hello " * 100
    raw = zlib.compressobj(wbits=-15)
    body = {
        "gzip": gzip.compress(text),
        "deflate": zlib.compress(text),
        "raw": raw.compress(text) + raw.flush(),
        "": text,
    }
    encoding = {"raw": "deflate", "": "identity"}.get(pack, pack)
    async with Web({"/": answer(body[pack], "text/plain", Content_Encoding=encoding)}) as web:
        assert (await page(web, "http://a.com/")).body == text


@pytest.mark.parametrize(
    "said",
    [
        b"SSH-2.0-OpenSSH\r\n\r\n", b"", b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nshort",
        b"HTTP/1.1 abc\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\nabc", b"HTTP/1.1 200 OK\r\nX: " + b"y" * 200_000,
        b"HTTP/1.1 200 OK\r\nContent-Encoding: br\r\nContent-Length: 1\r\n\r\nx", b"HTTP/1.1 100 Continue\r\n\r\n" * 20,
        b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 4\r\n\r\nnope",
    ],
    ids=range(11),
)  # fmt: skip
async def test_servers_that_do_not_speak_as_they_should(said: bytes) -> None:
    async with Web({"/": said}) as web:
        with pytest.raises(ToolError, match="did not answer as a web server does"):
            await page(web, "http://a.com/")


async def test_a_server_that_says_nothing_is_not_waited_for_and_left() -> None:
    async with Web({"/": [None]}) as web:
        going = asyncio.create_task(page(web, "http://a.com/", seconds=100))
        await web.waiting.wait()
        await pass_time(100)
        with pytest.raises(ToolError, match=r"was not done within 100 s"):
            await going
        await web.closed.wait()


async def test_a_fetch_that_is_cancelled_closes_its_socket() -> None:
    async with Web({"/": [b"HTTP/1.1 200 OK\r\n\r\npart", None]}) as web:
        fetching_it = asyncio.create_task(page(web, "http://a.com/"))
        await web.waiting.wait()
        fetching_it.cancel()
        with pytest.raises(asyncio.CancelledError):
            await fetching_it
        await web.closed.wait()
    assert web.closed.is_set()


@pytest.mark.parametrize(
    ("body", "kind", "text"),
    [
        (b'{"a": 1}', "application/json", '{"a": 1}'),
        (b"<a/>", "application/atom+xml", "<a/>"),
        ("grün".encode("latin-1"), "text/plain; charset=iso-8859-1", "grün"),
        ("grün".encode(), 'text/plain; charset="nonsense"', "grün"),
        (b"gr\xffn", "text/plain; charset=utf-8", "gr\ufffdn"),
        (b"\xef\xbb\xbfhi", "text/plain", "hi"),
        ("hi".encode("utf-16"), "text/plain", "hi"),
        (b"+ADw-", "text/plain; charset=utf-7", "+ADw-"),
        (b"\\x41", "text/plain; charset=unicode_escape", "\\x41"),
        ("<meta charset=latin-1>grün".encode("latin-1"), "text/html", "grün"),
        (b"<!DOCTYPE html><p>x</p>", "", "x"),
        (b"plain", "", "plain"),
    ],
)
def test_text_of_every_kind(body: bytes, kind: str, text: str) -> None:
    assert extract_text(body, kind, "http://a.com/") == text


@pytest.mark.parametrize("kind", ["application/pdf", "image/png", "application/octet-stream", ""])
def test_what_is_no_text_is_refused(kind: str) -> None:
    with pytest.raises(ToolError, match="only HTML, text, JSON and XML"):
        extract_text(b"%PDF\0\0", kind, "http://a.com/x")


def test_html_becomes_text_with_links() -> None:
    html = """<html><head><title>A &amp; B</title><style>p {}</style></head><body><h2>Head</h2>
      <p>some <b>bold</b> text, 1 < 2, <a class=x href="/doc?a=1&amp;b=2">the <i>doc</i></a>
      <a href="javascript:x">no</a></p>
      <!-- hidden > text --><ul><li>one<li>two</ul><pre>  code\n    deeper</pre>
      <table><tr><td>1</td><td>2</td></tr></table><script>if (a < b) { evil("</p>") }</script>
      <img alt="a cat"></body>"""
    assert [line for line in extract_html_text(html, "https://a.com/x/").split("\n") if line] == [
        "A & B", "## Head", "some bold text, 1 < 2, [the doc](https://a.com/doc?a=1&b=2) no", "- one", "- two",
        "  code", "    deeper", "| 1 | 2", "[image: a cat]",
    ]  # fmt: skip


@given(st.text(alphabet="<>/!-ab='\" \n&;#script", max_size=300))
def test_no_html_breaks_it(html: str) -> None:
    assert isinstance(extract_html_text(html, "https://a.com/"), str)


@pytest.mark.parametrize("piece", ["<a ", "<", "</", "<!--", "<a href='", "<script></script", "<!", "<a>", "<b <a>"])
def test_html_made_to_hurt_is_read_in_linear_time(piece: str) -> None:
    extract_html_text((piece * 200_000)[:500_000] + ">", "https://a.com/")  # quadratic, it would take the whole minute
    assert extract_html_text(piece * 3 + ">words", "https://a.com/") is not None
