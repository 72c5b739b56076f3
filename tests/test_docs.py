"""Documentation cannot drift: its links lead somewhere and its make commands exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
COMMAND = re.compile(r"`make ([a-z -]+?)(?: [A-Z_]+=[^`]*)?`|^make ([a-z -]+?)(?: +#.*| [A-Z_]+=.*)?$", re.MULTILINE)
TARGET = re.compile(r"^([a-z-]+):", re.MULTILINE)


def _anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as the usual Markdown renderers make them."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).strip().replace(" ", "-") for h in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_a_relative_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    broken = []
    for link in LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", link):
            continue  # other people's pages are not reachable from a test
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (anchor and anchor not in _anchors(target)):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_a_make_command_names_targets_that_exist(page: Path) -> None:
    targets = set(TARGET.findall((ROOT / "Makefile").read_text(encoding="utf-8")))
    commands = COMMAND.findall(page.read_text(encoding="utf-8"))
    named = {word for pair in commands for word in "".join(pair).split()}
    assert named <= targets
