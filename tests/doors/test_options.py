"""Options: a wrong one is an error that names what was meant."""

from __future__ import annotations

from typing import Any

import pytest

from mla_compile.errors import OptionError
from mla_compile.options import Options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lowerin": "aten"}, "did you mean 'lowering'"),
        ({"forms": "absorbd"}, "did you mean 'absorbed'"),
        ({"max_autotun": True}, "did you mean 'max_autotune'"),
        ({"verify": 1}, "expected True or False"),
        ({"fold": True}, "expected one of auto, never, always"),
        ({"inductor": 3}, "mapping"),
        ([("fold", "never")], "mapping"),
    ],
)
def test_wrong_options_name_what_was_meant(options: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Options.parse(options)
