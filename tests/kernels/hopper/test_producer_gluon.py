"""Bugs put into the producer of the Hopper kernel are caught; that it is right is shown in test_decode_gluon.py."""

import pytest

from tests.support.gluon_cases import CASES, assert_caught

FREE_ROPE = "            mbarrier.wait(joint(bars.index(FREE + 2 * stage + 1)), phase)\n"
SPLIT = {"lens": [447, 130], "H": 20, "S": 2, "page": 64}

BUGS = {  # what is wrong: (text, replacement, a case that shows it)
    "producer waits for the wrong phase": ("used0, used1) & 1) ^ 1", "used0, used1) & 1)", SPLIT),
    "rope overwritten while P is read": (FREE_ROPE, "", SPLIT),
    "no rope: the second half overwritten while it is read": (FREE_ROPE, "", SPLIT | {"rope": 0}),
    "tiles fetched that the list leaves out": ("i = place_of(listed, plane, block)", "i = block", CASES["mask"]),
    "slot past the length looked up": ("mask=inside, other=0)", "mask=token >= 0, other=0)", CASES["page 16"]),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_seeded_bug_is_caught(bug):
    assert_caught(*BUGS[bug])
