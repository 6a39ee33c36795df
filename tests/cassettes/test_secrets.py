"""What is never written down, by value and by look."""

import pytest

from retinue.core.secrets import SCRUBBED, scrub, values


@pytest.mark.parametrize(
    "secret",
    [
        "sk-ant-api03-abcdefghijklmnop_qrst",
        "sk-proj-0123456789abcdefghij",
        "ghp_0123456789abcdefghijABCDEFGHIJ012345",
        "AKIAIOSFODNN7EXAMPLE",
        "AIzaSyA0123456789abcdefghijklmnopqrstuv",
        "xoxb-123456789012-abcdef",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.abc-DEF_1",
        "-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY-----",
    ],
)
def test_what_looks_like_a_key_is_scrubbed(secret: str) -> None:
    assert scrub(f"before {secret} after") == f"before {SCRUBBED} after"


@pytest.mark.parametrize(
    "text",
    [
        "Authorization: Bearer abcdefgh12",
        '"authorization": "Basic dXNlcjpwYXNz"',
        "x-api-key: 12345678abc",
        "bearer 0123456789",
    ],
)
def test_the_value_of_an_authorization_is_scrubbed(text: str) -> None:
    scrubbed = scrub(text)
    assert SCRUBBED in scrubbed and not any(
        word in scrubbed for word in ("abcdefgh12", "dXNl", "12345678abc", "0123456789")
    )


def test_values_of_the_environment_are_known_by_their_names() -> None:
    environment = {
        "MY_API_KEY": "plain-words-here",
        "SHORT_KEY": "abc",
        "HOME": "/home/someone",
        "DB_PASSWORD": "plain-words",
    }
    known = values(environment)
    assert known == ("plain-words-here", "plain-words")
    assert (
        scrub("plain-words-here and plain-words in /home/someone", known)
        == f"{SCRUBBED} and {SCRUBBED} in /home/someone"
    )


@pytest.mark.parametrize(
    "text", ["a task-list of keys", "sk-1", "the bearer of news", "author: someone", "risk-management-approach"]
)
def test_words_stay(text: str) -> None:
    assert scrub(text) == text
