"""Links and anchors of markdown files, as GitHub makes them."""

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

FENCE = re.compile(r"^(```|~~~).*?^\1\s*$", re.M | re.S)
CODE = re.compile(r"`[^`\n]*`")
LINK = re.compile(r"\]\(<?([^)\s>]+)>?\)|\b(?:src|srcset|href)=\"([^\"]+)\"")


def anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings; a repeated one gets a number."""
    seen: Counter[str] = Counter()
    found = set()
    for heading in re.findall(r"^#{1,6} +(.*?) *#*$", FENCE.sub("", text), re.M):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
        found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return found


def links(text: str) -> list[str]:
    """Return the targets of a page's links and pictures, without those of other sites."""
    shown = CODE.sub("", FENCE.sub("", text))
    targets = [first or second for first, second in LINK.findall(shown)]
    return [target for target in targets if not re.match(r"[a-z]+:", target)]


def broken(page: Path, text: str) -> Iterator[str]:
    """Give the links of a page that lead nowhere."""
    for target in links(text):
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        if not path.exists():
            yield f"{page.name}: {target}: no such file"
        elif anchor and anchor not in anchors(text if path == page else path.read_text()):
            yield f"{page.name}: {target}: no such heading"
