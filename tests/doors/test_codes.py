"""Codes are stable, and each says what to change."""

from __future__ import annotations

import json

from mla_compile.codes import CODES, Code
from mla_compile.core.records import VERDICTS


def test_codes_are_stable():
    """Scripts match on these strings: a code may be added here, never renamed or removed."""
    assert {str(code): CODES[code].verdict for code in Code} == {
        "absorbed": "absorbed",
        "cost_prefill": "kept",
        "cost_latent_wide": "kept",
        "forms_expanded": "kept",
        "keys_used_elsewhere": "kept",
        "values_used_elsewhere": "kept",
        "per_head_rope": "kept",
        "verify_failed": "kept",
        "code_failed": "kept",
        "too_many_sources": "kept",
        "training": "kept",
        "ranks_differ": "kept",
        "already_absorbed": "kept",
        "shared_rows": "kept",
        "position_dependent": "refused",
        "nonlinear": "refused",
        "token_mixing": "refused",
        "head_dependent_latent": "refused",
        "softmax_axis": "refused",
        "not_softmax": "refused",
        "dropout": "refused",
        "mask_depends_on_keys": "refused",
        "unsupported_weight": "refused",
        "quantized_rows": "refused",
        "unknown_product": "refused",
        "unsupported_op": "refused",
        "collective": "refused",
        "graph_break": "refused",
        "wrapped_forward": "refused",
        "expanded_inputs": "refused",
        "expanded_cache": "refused",
        "not_mla": "not_mla",
    }
    assert set(CODES) == set(Code)


def test_every_refusal_says_what_to_change():
    assert all(info.verdict in VERDICTS and info.meaning for info in CODES.values())
    assert all(info.fix for info in CODES.values() if info.verdict == "refused")


def test_a_code_is_its_string():
    assert Code.TRAINING == "training"
    assert f"{Code.TRAINING} {Code.TRAINING!s}" == "training training"
    assert json.dumps(Code.TRAINING) == '"training"'
