"""What all tests of commands share."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
from typer import testing


@pytest.fixture(autouse=True, scope="package")
def _parser_made_once() -> Iterator[None]:
    """Making the parser of all commands takes thirty times as long as a command that only says what is wrong."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(testing, "_get_command", functools.cache(testing._get_command))
        yield
