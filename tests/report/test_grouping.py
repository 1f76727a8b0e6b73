"""Sites of equal layers are one group, and sites that differ are told apart."""

from __future__ import annotations

import dataclasses

import pytest

from mla_compile.core.dims import Dims
from mla_compile.report.grouping import grouped, module_pattern
from tests.support.reports import absorbed

V3 = Dims(H=128, L=512, R=64, N=128, V=128, Q=1536, D=7168)


def test_sites_of_equal_layers_are_one_group_with_the_worst_measurements():
    (group,) = grouped([absorbed(layer) for layer in (0, 1, 2, 5)])
    assert group.where == "model.layers.{0-2,5}.self_attn"
    assert [site.index for site in group.sites] == [0, 1, 2, 5]
    assert group.precision_ratio == 0.55
    assert group.fold_error == pytest.approx(6e-7)


@pytest.mark.parametrize(
    "change",
    [
        {"reason": "another"},
        {"form": "folded"},
        {"dims": dataclasses.replace(V3, H=64)},
        {"break_even_S": 3.0},
        {"notes": ()},
        {"where": dataclasses.replace(absorbed(1).where, line=78)},
        {"where": dataclasses.replace(absorbed(1).where, module="model.layers.1.cross_attn")},
    ],
    ids=lambda change: next(iter(change)),
)
def test_sites_that_differ_are_told_apart(change):
    assert len(grouped([absorbed(0), absorbed(1)])) == 1
    assert len(grouped([absorbed(0), absorbed(1, **change)])) == 2


def test_groups_keep_the_order_of_first_appearance():
    folded = [absorbed(layer, form="folded") for layer in (1, 3)]
    groups = grouped([absorbed(0), folded[0], absorbed(2), folded[1]])
    assert [group.where for group in groups] == ["model.layers.{0,2}.self_attn", "model.layers.{1,3}.self_attn"]


@pytest.mark.parametrize(
    ("paths", "pattern"),
    [
        (["layers.7.attn"], "layers.7.attn"),
        (["layers.7.attn", "layers.7.attn"], "layers.7.attn"),
        (["h.0", "h.1", "h.10", "h.9"], "h.{0-1,9-10}"),
        (["layers.0.attn.0", "layers.0.attn.1", "layers.1.attn.0", "layers.1.attn.1"], "layers.{0-1}.attn.{0-1}"),
        (["layers.0.attn.0", "layers.1.attn.1"], "layers.0.attn.0, layers.1.attn.1"),
        (["L['self'].layers[0].attn", "L['self'].layers[1].attn"], "L['self'].layers[{0-1}].attn"),
        (["encoder.0", "decoder.0"], "encoder.0, decoder.0"),
        (["block1.attn", "block2.attn"], "block1.attn, block2.attn"),
        ([""], ""),
    ],
)
def test_module_pattern(paths, pattern):
    assert module_pattern(paths) == pattern
