"""The dashboard for Grafana shows metrics that the server has."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from serve.tests.conftest import serving

from interposer_engine import load

pytestmark = [pytest.mark.process, pytest.mark.xdist_group("serve")]

DASHBOARD = Path(__file__).parents[1] / "grafana.json"


def test_every_metric_of_the_dashboard_exists(chat_folder: Path) -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    expressions = [target["expr"] for panel in panels for target in panel["targets"]]
    names = {
        name for text in expressions for name in re.findall(r"(?:interposer|gen_ai)_\w+", text)
    }
    with serving(load(chat_folder, "float32", cache_tokens=512, prefix_cache=True)) as served:
        served.complete(max_tokens=2)
        lines = served.ask("/metrics").body.splitlines()
    existing = {re.split(r"[{ ]", line)[0] for line in lines}
    assert len(names) > 10
    assert names <= existing
