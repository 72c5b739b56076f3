"""docs/models.md says what the code does."""

import re
from pathlib import Path

from moesaic.models.families import PROVEN, REFUSED

PAGE = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in re.findall(r"^\|.*\|$", PAGE, re.MULTILINE)]


def test_the_page_lists_the_proven_families_with_their_experts_and_attention() -> None:
    listed = [tuple(row[:3]) for row in ROWS if len(row) == 5][2:]
    assert listed == [
        (name, family.experts, ", ".join(family.attention_features) or "-") for name, family in PROVEN.items()
    ]


def test_differences_on_the_page_are_within_the_tolerance() -> None:
    seen = [float(row[3]) for row in ROWS if len(row) == 5 and row[0] in PROVEN]
    assert len(seen) == len(PROVEN)
    assert max(seen) <= 1e-4


def test_the_page_lists_the_refused_families_with_their_reasons() -> None:
    assert {row[0]: row[1] for row in ROWS if len(row) == 2 and row[0] in REFUSED} == dict(REFUSED)
    assert len([row for row in ROWS if len(row) == 2]) == len(REFUSED) + 2
