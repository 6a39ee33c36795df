"""A page's bytes as text a model can read: HTML without its markup but with its links, other text as it is. Pure."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from html import unescape
from urllib.parse import urljoin

from retinue.core.errors import ToolError

_HTML = ("text/html", "application/xhtml+xml")
_TEXT = ("application/json", "application/xml", "application/javascript", "application/yaml", "application/toml")
_ENCODINGS = ("utf", "ascii", "iso8859", "cp", "koi8", "mac-", "gb", "big5", "euc", "shift_jis", "iso2022", "tis")
_UNREADABLE = ("utf-7",)
_META = re.compile(rb"<meta[^>]{0,200}?charset\s*=\s*[\"']?([A-Za-z0-9_.:-]{1,40})", re.IGNORECASE)
_MARKS = ((codecs.BOM_UTF8, "utf-8-sig"), (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"))
_SKIPPED = frozenset({"script", "style", "noscript", "template", "svg", "math", "iframe", "object", "canvas"})
_BLOCKS = frozenset({
    "address", "article", "aside", "blockquote", "br", "dd", "details", "div", "dl", "dt", "fieldset", "figcaption",
    "figure", "footer", "form", "h1", "h2", "h3", "h4", "h5", "h6", "header", "hr", "li", "main", "nav", "ol", "p",
    "pre", "section", "summary", "table", "tbody", "tfoot", "thead", "title", "tr", "ul",
})  # fmt: skip
_HEADINGS = {f"h{n}": "#" * n + " " for n in range(1, 7)}
_SPACE = re.compile(r"[ \t\r\n\f\v]+")
_EMPTY_LINES = re.compile(r"\n{3,}")
_TAG = re.compile(r"(/?[a-zA-Z][a-zA-Z0-9:-]*)(.*)", re.DOTALL)
_VALUE = r"\s*=\s*(?:\"([^\"]*)\"|'([^']*)'|([^\s\"'>]+))"
_ATTRIBUTES = {name: re.compile(rf"(?:^|[\s\"'/]){name}{_VALUE}", re.IGNORECASE) for name in ("href", "alt")}
TAG_CHARACTERS = 4096


def extract_text(body: bytes, content_type: str, url: str) -> str:
    """Return the text of a page; ToolError if it has none."""
    kind, _, rest = content_type.partition(";")
    kind = kind.strip().lower()
    looks = body[:1024].lstrip()[:15].lower()
    is_html = kind in _HTML or (not kind and looks.startswith((b"<!doctype html", b"<html")))
    is_text = is_html or kind.startswith("text/") or kind in _TEXT or kind.endswith(("+json", "+xml"))
    if not is_text and (kind or b"\0" in body[:4096]):
        raise ToolError(f"web_fetch: {url} is {kind[:80] or 'binary'}: only HTML, text, JSON and XML can be read")
    text = _decode(body, rest)
    return extract_html_text(text, url) if is_html else text


def _decode(body: bytes, parameters: str) -> str:
    """Decode a page in the encoding it has or names; bytes that do not fit become a replacement character."""
    found = re.search(r"charset\s*=\s*[\"']?([A-Za-z0-9_.:-]{1,40})", parameters, re.IGNORECASE)
    meta = _META.search(body[:2048])
    named = found[1] if found else meta[1].decode("ascii") if meta else "utf-8"
    for mark, encoding in _MARKS:
        if body.startswith(mark):
            named = encoding
    try:
        codec = codecs.lookup(named).name
    except LookupError:
        codec = "utf-8"
    known = codec.startswith(_ENCODINGS) and codec not in _UNREADABLE
    return body.decode(codec if known else "utf-8", "replace")


def extract_html_text(html: str, url: str) -> str:
    """Return the text of a page, a line for each block, links as `[text](address)`."""
    reader = _Reader(url)
    for tag, words in _split_tokens(html):
        if tag:
            reader.add_tag(tag, words)
        else:
            reader.add_text(words)
    return reader.make_text()


def _split_tokens(html: str) -> Iterator[tuple[str, str]]:
    """Yield tags, as name and attributes (`/name` for an end), and the text between them, under no name.

    One pass, in time linear in the page: the standard library's parser takes minutes for a page made to hurt it."""
    at, end = 0, -1
    while at < len(html):
        tag = html.find("<", at)
        if 0 <= end < tag or end < 0 <= tag:
            end = html.find(">", tag)
        if tag < 0 or end < 0:
            yield "", html[at:]
            return
        yield "", html[at:tag]
        if html.startswith("<!--", tag):
            end = html.find("-->", tag + 4)
            if end < 0:
                return
            at = end + 3
            continue
        found = _TAG.match(html[tag + 1 : min(end, tag + TAG_CHARACTERS)])
        if found is None and html[tag + 1] not in "!?/":  # a plain < in the text
            yield "", "<"
            at = tag + 1
            continue
        at = end + 1
        if found is None:
            continue
        name = found[1].lower()
        yield name, found[2]
        if name in _SKIPPED:
            closing = re.compile(f"</{name}", re.IGNORECASE).search(html, at)
            if closing is None:
                return
            at = closing.start()


class _Reader:
    def __init__(self, base: str) -> None:
        self._base = base
        self._parts: list[str] = []
        self._plain = 0
        self._link: tuple[str, int] | None = None

    def add_tag(self, tag: str, attributes: str) -> None:
        name = tag.removeprefix("/")
        if name in _BLOCKS:
            self._parts.append("\n" if tag != name else "\n" + _HEADINGS.get(name, "- " if name == "li" else ""))
        elif tag in ("td", "th"):
            self._parts.append(" | ")
        if name == "pre":
            self._plain = max(0, self._plain + (1 if tag == name else -1))
        if name == "a" and self._link is not None:
            self._close_link()
        if tag in ("a", "base") and (href := _find_attribute(attributes, "href")):
            if tag == "a":
                self._link = (href, len(self._parts))
            else:
                self._base = _join_address(self._base, href)
        elif tag == "img" and (words := _find_attribute(attributes, "alt")):
            self._parts.append(f"[image: {words}]")

    def add_text(self, text: str) -> None:
        plain = unescape(text)
        self._parts.append(plain if self._plain else _SPACE.sub(" ", plain))

    def make_text(self) -> str:
        lines = (line.rstrip() if line.startswith("  ") else line.strip() for line in "".join(self._parts).split("\n"))
        return _EMPTY_LINES.sub("\n\n", "\n".join(lines)).strip("\n")

    def _close_link(self) -> None:
        assert self._link is not None
        (href, begun), self._link = self._link, None
        address = _join_address(self._base, href)
        words = " ".join("".join(self._parts[begun:]).split())
        if words and address.startswith(("http://", "https://")):
            self._parts[begun:] = [f"[{words}]({address})"]


def _find_attribute(attributes: str, name: str) -> str:
    found = _ATTRIBUTES[name].search(attributes)
    return unescape(next((value for value in found.groups() if value is not None), "")) if found else ""


def _join_address(base: str, href: str) -> str:
    try:
        return urljoin(base, href.strip())
    except ValueError:
        return ""
