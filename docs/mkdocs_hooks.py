"""What MkDocs does for the site besides rendering: a hook of mkdocs.yml.

The pages are written for the code hosting page first, where links lead to files of the repository, and its renderer is
CommonMark. So links are turned to where their targets are in the site and named after them, two files from outside of
docs/ become pages, and it is a warning (an error for `mkdocs build --strict`) if a page has other elements or text than
CommonMark makes of it, or if the site fetches anything from elsewhere.
"""

from __future__ import annotations

import logging
import posixpath
import re
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, Final

from markdown_it import MarkdownIt
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT: Final = Path(__file__).resolve().parent.parent
MOVED: Final = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
"""Pages of the site that are not in docs/, by their path in the repository."""
STANDS_FOR: Final = {"README.md": "index.md"}
LINK: Final = re.compile(r"(!?)\[([^\]]*)\]\((?![a-z]+:|#)([^)#\s]+)(#[^)\s]*)?\)")

COMPARED: Final = {"h1", "h2", "h3", "ul", "ol", "li", "table", "tr", "th", "td", "pre", "code", "img", "strong", "em"}
FETCHING: Final = {"script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src", "audio": "src"}
DESCRIPTION: Final = 200  # letters

log = logging.getLogger("mkdocs.hooks.site")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for path, name in MOVED.items():
        files.append(File.generated(config, name, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    text = relinked(markdown, page.file.src_uri, config.extra["source"])
    if page.file.src_uri == "changelog.md":
        page.meta["search"] = {"exclude": True}  # it names everything once
    # A bar in code in a table needs a backslash for CommonMark, and shows it with Python-Markdown.
    return re.sub(r"(?m)^\|.*$", lambda row: re.sub(r"`[^`]*`", lambda code: code[0].replace("\\|", "|"), row[0]), text)


def relinked(markdown: str, name: str, source: str) -> str:
    """Turns links within the repository to the site, or to `source`; without that, links to code become text."""
    here = next((path for path, moved in MOVED.items() if moved == name), f"docs/{name}")

    def turned(match: re.Match[str]) -> str:
        picture, text, target, anchor = match.groups(default="")
        path = posixpath.normpath(posixpath.join(posixpath.dirname(here), target))
        there = {**MOVED, **STANDS_FOR}.get(path, path.removeprefix("docs/") if path.startswith("docs/") else None)
        if there is not None:
            if text in (path, posixpath.basename(path)):
                text = title(path)
            return f"{picture}[{text}]({posixpath.relpath(there, posixpath.dirname(name) or '.')}{anchor})"
        return f"{picture}[{text}]({source}{path})" if source else text

    return LINK.sub(turned, markdown)


@cache
def title(path: str) -> str:
    """The heading of a page, which stands in the site where the page is called by its file's name."""
    return (ROOT / path).read_text("utf-8").partition("\n")[0].removeprefix("# ")


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> None:
    written = relinked(page.file.content_string, page.file.src_uri, config.extra["source"])
    found, expected = Elements(html), Elements(MarkdownIt("commonmark").enable("table").render(written))
    for here, there in zip([*found.items, "the end"], [*expected.items, "the end"], strict=False):
        if here != there:
            log.warning("%s: CommonMark has %s where the site has %s", page.file.src_uri, there, here)
            break
    page.meta.setdefault("description", description(found.paragraph))


def description(paragraph: str) -> str:
    """The first sentences of a page, as far as they are short enough."""
    if len(paragraph) <= DESCRIPTION:
        return paragraph
    end = paragraph.rfind(". ", 0, DESCRIPTION)
    return paragraph[: end + 1] if end > 0 else paragraph[: paragraph.rfind(" ", 0, DESCRIPTION)] + " …"


class Elements(HTMLParser):
    """The tags of `COMPARED` and the text between them without blanks, and the first paragraph."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.items: list[str] = []
        self.paragraph = ""
        self._in_paragraph = self._in_permalink = False
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._in_permalink = tag == "a" and ("class", "headerlink") in attrs
        self._in_paragraph = self._in_paragraph or (tag == "p" and not self.paragraph)
        if tag in COMPARED:
            self.items.append(f"<{tag}>")

    def handle_endtag(self, tag: str) -> None:
        self._in_permalink = self._in_permalink and tag != "a"
        self._in_paragraph = self._in_paragraph and tag != "p"
        if tag in COMPARED - {"img"}:
            self.items.append(f"</{tag}>")

    def handle_data(self, data: str) -> None:
        if self._in_permalink:
            return
        text = "".join(data.split())
        if text and self.items and not self.items[-1].startswith("<"):
            self.items[-1] += text
        elif text:
            self.items.append(f"…{text}")
        if self._in_paragraph:
            self.paragraph += data.replace("\n", " ")


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Gives the theme's search a name, for who hears the page."""
    dialog = 'data-md-component="search" role="dialog"'
    return output.replace(dialog, f'{dialog} aria-label="Search"')


def on_post_build(config: MkDocsConfig) -> None:
    site = Path(config.site_dir)
    for file in sorted(site.rglob("*.html")):
        for address in Fetched(file.read_text("utf-8")).elsewhere:
            log.warning("%s fetches %s", file.relative_to(site), address)
    for file in sorted(site.rglob("*.css")):
        for address in re.findall(r"(?:url\(\s*|@import\s*)[\"']?((?:https?:)?//[^\"')]+)", file.read_text("utf-8")):
            log.warning("%s fetches %s", file.relative_to(site), address)


class Fetched(HTMLParser):
    """What a page fetches from elsewhere without a click."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elsewhere: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, Any]]) -> None:
        given = dict(attrs)
        fetches = tag == "link" and given.get("rel") not in ("canonical", "next", "prev", "alternate")
        address = given.get("href" if fetches else FETCHING.get(tag, "")) or ""
        if re.match(r"(https?:)?//", address):
            self.elsewhere.append(address)
