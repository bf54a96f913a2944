"""The page of figures: ``docs/torture.md``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "torture.md"


def write_page(seconds: float, results: dict[str, Any], not_injected: list[str]) -> None:
    PAGE.write_text(str(results))
