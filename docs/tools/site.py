"""The hooks that mkdocs runs: pages from outside docs/, the options of commands, the version, and the list of versions.

Markdown files link to each other as GitHub resolves links, and some of them lie outside docs/. They become pages of the
site here, and the links to them follow. Each build goes to ``site/VERSION/``; ``site/versions.json`` lists what is
there, in the form that the theme's version selector reads.
"""

from __future__ import annotations

import html
import json
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from penstock.version import __version__

ROOT = Path(__file__).parents[2]
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "development/contributing.md",
    "SECURITY.md": "development/security-policy.md",
    "bench/README.md": "development/running-benchmarks.md",
    "src/penstock/bench/origin/README.md": "development/benchmark-server.md",
    "tests/README.md": "development/tests.md",
    "examples/README.md": "examples/index.md",
}
ASSETS = ["LICENSE", *(path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "examples").glob("*.py")))]
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
REDIRECT = '<!doctype html><meta http-equiv="refresh" content="0; url={0}/"><a href="{0}/">{0}</a>\n'


def on_config(config: Any) -> Any:
    """Build into a folder that is named after the version."""
    if not config.site_dir.endswith(__version__):
        config.site_dir = str(Path(config.site_dir) / __version__)
    config.copyright = f"penstock {__version__}, Apache License 2.0"
    return config


def on_files(files: Files, *, config: Any) -> Files:
    """Add the pages and the files that lie outside docs/."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    for source in ASSETS:
        files.append(File.generated(config, source, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Lead links of a page to the pages of the site; a link to any other file of the repository becomes its text."""
    by_page = {page: source for source, page in PAGES.items()}
    here = page.file.src_uri
    source = by_page.get(here, f"docs/{here}")

    def moved(match: re.Match[str]) -> str:
        mark, text, target = match.groups()
        name, hash_, anchor = target.partition("#")
        if not name or re.match(r"[a-z]+:", target):
            return match[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), name))
        if path.startswith("docs/"):
            path = path.removeprefix("docs/")
        elif path in PAGES:
            path = PAGES[path]
        elif path not in ASSETS:
            return text
        return f"{mark}[{text}]({posixpath.relpath(path, posixpath.dirname(here) or '.')}{hash_}{anchor})"

    if here == "reference/cli.md":
        markdown = with_options(markdown)
    pieces = re.split(r"(^```.*?^```$)", markdown, flags=re.DOTALL | re.MULTILINE)
    return "".join(piece if piece.startswith("```") else LINK.sub(moved, piece) for piece in pieces)


def with_options(markdown: str) -> str:
    """The page of commands, with a table of its own options behind each command's section."""
    from penstock.cli.app import commands

    head, *sections = re.split(r"^(?=## `penstock )", markdown, flags=re.MULTILINE)
    by_name = commands().commands
    common = set(re.findall(r"`(--[\w-]+)", head))
    whole = [head.rstrip()]
    for section in sections:
        whole.append(section.rstrip())
        command = by_name[section.split()[2].strip("`")]
        for name, part in getattr(command, "commands", {"": command}).items():
            rows = [option_row(option) for option in part.params if not common.intersection(option.opts)]
            if any(rows):
                whole.append("\n".join([f"| {name} option | |", "|---|---|", *filter(None, rows)]))
    return "\n\n".join(whole) + "\n"


def option_row(option: Any) -> str:
    """A row of Markdown that shows an option; nothing for an argument."""
    if option.param_type_name != "option":
        return ""
    value = f" {option.metavar}" if option.metavar else ""
    names = ", ".join(f"<code>{html.escape(name + value)}</code>" for name in option.opts).replace("|", "&#124;")
    text = re.sub(r"(__\w+__)", r"`\1`", option.help or "").replace("*", "\\*").replace("|", "&#124;")
    default = f" Default: `{option.default}`." if value and option.default not in (None, "") else ""
    return f"| {names} | {text}{default} |"


def on_post_build(*, config: Any) -> None:
    """Write the list of the versions that were built, newest first, and a page that leads to the newest."""
    folder = Path(config.site_dir).parent
    built = [path.parent.name for path in folder.glob("*/index.html")]
    built.sort(key=lambda name: [int(number) for number in re.findall(r"\d+", name)], reverse=True)
    listed = [{"version": name, "title": name, "aliases": ["latest"] if name == built[0] else []} for name in built]
    (folder / "versions.json").write_text(json.dumps(listed, indent=2) + "\n")
    (folder / "index.html").write_text(REDIRECT.format(built[0]))
