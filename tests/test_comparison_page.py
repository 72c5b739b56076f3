"""The comparison says nothing without a source, and measured figures as they stand in the benchmarks."""

import re
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
PAGE = (DOCS / "comparison.md").read_text(encoding="utf-8")
LINKS = set(re.findall(r"^\[([\w-]+)\]: https://", PAGE, re.MULTILINE))


def rows(section: str) -> list[list[str]]:
    """The cells of the tables of a section, without heads and rules."""
    text = PAGE.split(f"\n## {section}\n")[1].split("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def test_every_cell_about_others_has_a_source_or_says_that_it_is_unknown() -> None:
    head, *features = rows("Features")
    assert len(head) == 7
    assert len(features) >= 12
    for name, ours, *others in features:
        assert len(others) == 5, name
        assert ours == "no" or "](" in ours, name
        for cell in others:
            used = re.findall(r"\]\[([\w-]+)\]", cell)
            assert cell == "unknown" or "](#" in cell or used, (name, cell)
            assert set(used) <= LINKS


def test_every_link_is_used() -> None:
    assert set(re.findall(r"\]\[([\w-]+)\]", PAGE)) == LINKS


def test_measured_rows_are_those_of_the_benchmark_pages() -> None:
    measured = {line for page in (DOCS / "benchmarks").glob("*.md") for line in page.read_text("utf-8").splitlines()}
    section = PAGE.split("\n## Measured\n")[1]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    assert len(lines) >= 16
    assert [line for line in lines if line not in measured] == []
