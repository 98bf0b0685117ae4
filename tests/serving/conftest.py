"""A server for the tests of a module."""

from collections.abc import Iterator

import pytest
from live import Running, served


@pytest.fixture(scope="module")
def server(checkpoint, tmp_path_factory) -> Iterator[Running]:
    """Serves the tiny text-to-video checkpoint, which edits and takes videos as well."""
    with served(checkpoint("t2v"), folder=tmp_path_factory.mktemp("serving")) as running:
        yield running
