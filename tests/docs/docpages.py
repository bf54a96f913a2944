"""The pages of the documentation, taken apart."""

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
PAGES = [page for page in PAGES if "_build" not in page.parts]


@dataclasses.dataclass
class Block:
    """A code block: its language, its text, its first line, and what stands before it.

    That is an HTML comment right before it, the line of text above, and the heading of its section.
    """

    page: Path
    line: int
    language: str
    text: str
    comment: str
    above: str = ""
    section: str = ""

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path, language: str = "") -> Iterator[Block]:
    text = page.read_text()
    pattern = r"(?:^<!-- ?([^>]*?) ?-->\n)?^([ ]*)```(\w+)[^\n]*\n(.*?)^\2```$"
    for match in re.finditer(pattern, text, re.M | re.S):
        if language in ("", match[3]):
            indent = re.compile(f"^{match[2]}", re.M)
            line = text.count("\n", 0, match.start(4)) + 1
            before = text[: match.start()].strip().splitlines()
            sections = [each.removeprefix("## ") for each in before if each.startswith("## ")]
            above, section = (lines[-1] if lines else "" for lines in (before, sections))
            yield Block(page, line, match[3], indent.sub("", match[4]), match[1] or "", above, section)
