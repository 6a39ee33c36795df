"""Nothing of the machine decides these tests: no proxy stands between the SDKs and the server, no key is real."""

import os

import pytest


@pytest.fixture(autouse=True)
def no_proxies_and_no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.lower().endswith(("_proxy", "_api_key", "_base_url")):
            monkeypatch.delenv(name)
