"""Parameters of published models, and how many of them a token reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mla_compile.models import config_file, skeleton
from mla_compile.models.weights import weights_of
from tests.support.tiers import also

CONFIGS = Path(__file__).resolve().parents[2] / "examples" / "configs"


# Billions of parameters as published, all and per token, with the precision they are published in.
PUBLISHED = {
    "deepseek-v2-lite": (15.7, 0.1, 2.4, 0.1),
    "deepseek-v3": (671.0, 0.5, 37.0, 1.0),
    "deepseek-v3.2": (671.0, 1.0, 37.0, 1.0),
    "deepseek-v4-flash": (284.0, 1.0, 13.0, 0.5),
    "deepseek-v4-pro": (1600.0, 50.0, 49.0, 1.0),
    "glm-4.7-flash": (30.0, 1.0, 3.0, 0.7),
    "glm-5-fp8": (744.0, 0.5, 40.0, 1.0),
    "kimi-k2": (1026.0, 15.0, 32.0, 0.7),
    "kimi-k2-thinking": (1026.0, 15.0, 32.0, 0.7),
    "longcat-flash": (560.0, 2.0, 27.0, 1.0),
    "minicpm3-4b": (4.07, 0.05, 4.07, 0.05),
    "mistral-small-4": (119.0, 1.0, 6.0, 0.5),
}


# By default one of each way to count: experts of several kinds or none, rows that heads share, a part of a config.
DEFAULT = ("deepseek-v2-lite", "deepseek-v4-flash", "glm-4.7-flash", "longcat-flash", "minicpm3-4b", "mistral-small-4")


@pytest.mark.parametrize("name", [*DEFAULT, *also("family", *(name for name in PUBLISHED if name not in DEFAULT))])
def test_weights_of_the_published_configs(name):
    """The models built from the configs have as many parameters as their makers say, in all and per token."""
    total, within, active, active_within = PUBLISHED[name]
    config, _ = config_file.read(str(CONFIGS / f"{name}.json"))
    weights = weights_of(skeleton.build(config))
    assert abs(weights.total / 1e9 - total) <= within
    # Makers count the input embedding or leave it out.
    assert min(abs((weights.active + lookup) / 1e9 - active) for lookup in (0, weights.lookup)) <= active_within


def test_every_config_is_one_of_a_model_somebody_published():
    assert {path.stem for path in CONFIGS.glob("*.json")} == set(PUBLISHED)
    assert all(json.loads(path.read_text())["_source"] for path in CONFIGS.glob("*.json"))
