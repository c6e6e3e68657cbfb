"""Checks the built site: every link and every picture leads to a file that is there, and every anchor to an element.

Run it as ``python docs/tools/links.py site/0.1.0``.
"""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """What a page links to, and the anchors that it has."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note the tag's links and names."""
        for name, value in attrs:
            if name in ("href", "src") and value:
                self.targets.append(value)
            elif name in ("id", "name") and value:
                self.anchors.add(value)


def broken_links(folder: Path) -> list[str]:
    """The links of all pages below `folder` that lead nowhere, each as ``page: target``."""
    pages = {path: Page(path.read_text()) for path in sorted(folder.rglob("*.html"))}
    broken = []
    for path, page in pages.items():
        for target in page.targets:
            link = urlsplit(target)
            if link.scheme or link.netloc or path.name == "404.html":
                continue
            found = (path.parent / unquote(link.path)).resolve() if link.path else path
            found = found / "index.html" if found.is_dir() else found
            anchor = unquote(link.fragment)
            if not found.is_file() or (anchor and found in pages and anchor not in pages[found].anchors):
                broken.append(f"{path.relative_to(folder)}: {target}")
    return broken


if __name__ == "__main__":
    failures = broken_links(Path(sys.argv[1]).resolve())
    print("\n".join(failures) or "every link of the site leads somewhere")
    sys.exit(bool(failures))
