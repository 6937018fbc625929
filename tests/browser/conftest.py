"""The chromium of the browser tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.browser import devtools


@pytest.fixture(scope="session", autouse=True)
def running_chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Start one for all tests, which takes more than a second of CPU time. Each test opens windows of its own."""
    if devtools.CHROMIUM is None:  # the tests are skipped
        yield
        return
    one = devtools.Chromium(tmp_path_factory.mktemp("chromium"))
    devtools.RUNNING.append(one)
    yield
    devtools.RUNNING.remove(one)
    one.close()
