"""Requests that schemathesis makes of the server's own OpenAPI description: such as it allows, and such as it does not.

It is no requirement of the tests, because it brings a plugin for pytest and a dozen packages: install it anywhere, and
have ``schemathesis`` on the path. ``MLA_SERVER_SCHEMA_S`` is for how many seconds it sends requests.
"""

from __future__ import annotations

import os
import shutil
import subprocess

import psutil
import pytest
import requests

from tests.support.server import another_client, until
from tests.support.tiers import full

pytestmark = pytest.mark.filterwarnings("ignore")  # of the server's dependencies
COMMAND = shutil.which("schemathesis")
SECONDS = int(os.environ.get("MLA_SERVER_SCHEMA_S", "60"))
# A valid prompt may have no tokens, or too many, and another model may be asked for.
CONFIG = """
[checks]
positive_data_acceptance.expected-statuses = ["2xx", "400", "404", "429"]
"""


@full("draws")
@pytest.mark.skipif(COMMAND is None, reason="schemathesis is not installed")
def test_requests_of_the_schema(served, model, tmp_path):
    """No 5xx, nothing but what the description has; others are served as if alone; memory stays."""
    server, address = served
    (tmp_path / "schemathesis.toml").write_text(CONFIG)
    asked = [str(COMMAND), "run", f"{address}/openapi.json", "--max-time", str(SECONDS), "--continue-on-failure"]
    asked += ["--request-timeout", "120"]  # some ask for as many tokens as there is room for
    before = psutil.Process().memory_info().rss
    with another_client(address, model):
        done = subprocess.run([*asked, "--no-color"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert psutil.Process().memory_info().rss - before < 128 << 20
    assert requests.get(f"{address}/health", timeout=60).status_code == 200
    until(lambda: server.desk.live == 0 and server.loaded.manager.batch_processor.cache.unheld() == 32)
