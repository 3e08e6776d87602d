"""Charts as parts of a page: SVG with tooltips, without what a file needs."""

from __future__ import annotations

import re
from html import unescape

from markupsafe import escape

#: A bar, or a line and the group of its markers, with tooltips; see `style.set_tips`.
_TIPS = re.compile(r'<g id="tip:([^"]*)">(\s*<path[^>]*/>|.*?</g>)\s*</g>', re.DOTALL)
_NUMBERS = re.compile(r' (?:d|x|y|width|height|transform)="[^"]*"')
_GROUPS = re.compile(r' id="(?![mp][0-9a-f]{10}")[^"]*"')


def inline_svg(svg: str) -> str:
    """An ``svg`` element for a page: tooltips as titles, coordinates to two decimals, other fonts if one is missing."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub("<metadata>.*?</metadata>|<defs>\\s*<style.*?</defs>", "", svg, flags=re.DOTALL)
    svg = svg.replace("<svg ", '<svg stroke-linejoin="round" role="img" ', 1).replace(
        "'DejaVu Sans'", "'DejaVu Sans', Verdana, sans-serif"
    )
    svg = _TIPS.sub(_with_titles, svg)
    svg = _NUMBERS.sub(lambda m: re.sub(r"(\.\d\d)\d+", r"\1", " " + " ".join(m[0].split())), svg)
    return re.sub(r">\s+<", "><", _GROUPS.sub("", svg))


def _with_titles(group: re.Match[str]) -> str:
    """The group with a title in each marker, or in itself if there is one tip."""
    tips, content = unescape(group[1]).split("\n"), group[2]
    titles = [f"<title>{escape(tip)}</title>" for tip in tips]
    if len(tips) == 1:
        return f"<g>{titles[0]}{content}</g>"
    if content.count("<use ") != len(tips):
        return f"<g>{content}</g>"
    rest = iter(titles)
    return f"<g>{re.sub('(<use [^>]*)/>', lambda use: f'{use[1]}>{next(rest)}</use>', content)}</g>"
