"""The chart of the documentation, as SVG that reads on light and dark pages."""

from __future__ import annotations

import math
from html import escape

from benchmarks.report import STORAGE_NAMES, number
from benchmarks.results import Series

WIDTH, LABEL, BAR, GAP = 860, 290, 17, 5
COLOURS = {"angee_jobs": "#0b7a5d", "bare": "#9aa5b1"}
OTHERS = "#c8743c"
_STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #24292f }
  .title { font-weight: 600; font-size: 15px } .value { font-size: 12px }
  @media (prefers-color-scheme: dark) { text { fill: #e6edf3 } }
"""
PANELS = (("block", "Blocks per second, one thread (longer is better)"),
          ("handover", "Hand-over between processes, median in ms (shorter is better, logarithmic)"),
          ("polite", "Entries per second, 8 polite processes on one key (longer is better)"))  # fmt: skip


def chart(series: list[Series]) -> str:
    """One panel for each of the measures that everybody asks about; within a storage, bars share a scale."""
    by_measure = {each.measure: each for each in series}
    lines: list[str] = []
    y = 10
    for measure, title in PANELS:
        if by_measure.get(measure) and by_measure[measure].values:
            y = _panel(lines, by_measure[measure], title, y)
    size = f'width="{WIDTH}" height="{y}" viewBox="0 0 {WIDTH} {y}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">\n<style>{_STYLE}</style>\n'
    return head + "\n".join(lines) + "\n</svg>\n"


def _panel(lines: list[str], series: Series, title: str, y: int) -> int:
    y += 18
    lines.append(f'<text class="title" x="10" y="{y}">{escape(title)}</text>')
    y += 8
    for storage, storage_name in STORAGE_NAMES.items():
        names = [name for name in series.values if name.startswith(f"{storage}/")]
        if len(names) < 2:
            continue
        medians = {name: series.median(name) for name in names}
        y += 8
        for name in sorted(names, key=lambda name: medians[name], reverse=series.more):
            short = name.partition("/")[2]
            length = round(_share(medians[name], [*medians.values()], series.more) * (WIDTH - LABEL - 90))
            middle = y + BAR - 4
            label = f"{storage_name}: {short}"
            lines += [
                f'<text x="{LABEL - 8}" y="{middle}" text-anchor="end">{escape(label)}</text>',
                f'<rect x="{LABEL}" y="{y}" width="{length}" height="{BAR}" rx="2" '
                f'fill="{COLOURS.get(short, OTHERS)}"/>',
                f'<text class="value" x="{LABEL + length + 6}" y="{middle}">{number(medians[name])}</text>',
            ]
            y += BAR + GAP
    return y + 14


def _share(value: float, values: list[float], more: bool) -> float:
    """The length of a bar: of times by their logarithm, since some are a hundred times others."""
    if more:
        return value / max(values)
    low, high = math.log10(min(0.5, min(values))), math.log10(max(values))
    return max(0.01, (math.log10(value) - low) / (high - low)) if high > low else 1.0
