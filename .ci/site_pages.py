"""What MkDocs is told beside mkdocs.yml: pages that do not lie in docs/, and where links between them lead.

All pages of the site lie side by side. A link to a file that is no page is left out, and its text stays.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from mkdocs.utils import get_relative_url

ROOT = Path(__file__).resolve().parents[1]

ELSEWHERE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
    "examples/README.md": "examples.md",
}
"""File of the repository -> page."""

FENCED = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
IN_HTML = re.compile(r'\b(src|srcset)="(?!\w+:)([^"]+)"')
LINK = re.compile(r"(!?)\[([^\[\]]*)\]\((?!\w+:)([^)#\s]*)(#[^)\s]+)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for source, page in ELSEWHERE.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    folder = posixpath.dirname(source_of(page.file.src_uri))
    parts = FENCED.split(markdown)
    parts[::2] = [LINK.sub(lambda link: led(link, folder), text) for text in parts[::2]]
    parts[::2] = [IN_HTML.sub(lambda link: led_in_html(link, folder, page), text) for text in parts[::2]]
    return "".join(parts)


def source_of(page: str) -> str:
    """The file of the repository that a page is made of."""
    return {to: source for source, to in ELSEWHERE.items()}.get(page, f"docs/{page}")


def led(link: re.Match[str], folder: str) -> str:
    """The link as the site has it. `folder`: of the file that it stands in."""
    image, text, path, anchor = link.groups(default="")
    if not path:
        return link[0]
    target = posixpath.normpath(posixpath.join(folder, path))
    if target in ELSEWHERE:
        return f"[{text}]({ELSEWHERE[target]}{anchor})"
    if target.startswith("docs/") and Path(target).suffix in (".md", ".png", ".svg"):
        return f"{image}[{text}]({target.removeprefix('docs/')}{anchor})"
    return text


def led_in_html(link: re.Match[str], folder: str, page: Page) -> str:
    """An image in HTML, which MkDocs leaves as it is, though a page lies one folder deeper than its source."""
    attribute, path = link.groups()
    image = posixpath.normpath(posixpath.join(folder, path)).removeprefix("docs/")
    return f'{attribute}="{get_relative_url(image, page.url)}"'
