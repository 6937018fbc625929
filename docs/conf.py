"""Configuration of the documentation site (`make site`): Sphinx with MyST and Furo.

The source folder is the top of the repository, so that links between Markdown files hold on GitHub and on the site. The
README is the first page, and the links of its section "Documentation" are the navigation. A page that is not linked
there, and a link that leads nowhere, end a strict build.
"""

from __future__ import annotations

import re
import shutil
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parents[1]
PART = re.compile(r"^\*\*(?P<caption>[^*]+)\*\*\n\n(?P<links>(?:[* ] .*\n)+)", re.MULTILINE)
LINK = re.compile(r"\]\((?P<page>[\w/-]+)\.md\)")

project = "keepstep"
release = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
extensions = ["myst_parser", "sphinx_copybutton"]
root_doc = "README"
include_patterns = [
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "benchmarks/README.md",
    "benchmarks/MEASURED.md",
    "docs/*.md",
]
myst_heading_anchors = 6
highlight_language = "none"
html_theme = "furo"
html_title = "keepstep"
html_static_path = ["site"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_copyright = False
copybutton_exclude = ".linenos, .gp, .go"


def navigation(readme: str) -> str:
    """Return hidden tables of contents, one for each part of the section "Documentation"."""
    _, _, section = readme.partition("\n## Documentation\n")
    parts = list(PART.finditer(section.partition("\n## ")[0]))
    tables = [
        "\n".join(("```{toctree}", ":hidden:", f":caption: {part['caption']}", "", *pages, "```"))
        for part in parts
        if (pages := dict.fromkeys(LINK.findall(part["links"])))
    ]
    return "\n\n".join(tables)


def add_navigation(_app: Sphinx, name: str, source: list[str]) -> None:
    if name == root_doc:
        source[0] += "\n\n" + navigation(source[0]) + "\n"


def finish(app: Sphinx, error: Exception | None) -> None:
    """Copy the pictures that pages name in HTML, and let the first page answer for the folder."""
    if error is None:
        shutil.copytree(ROOT / "docs" / "images", app.outdir / "docs" / "images", dirs_exist_ok=True)
        shutil.copy(app.outdir / "README.html", app.outdir / "index.html")


def setup(app: Sphinx) -> None:
    app.connect("source-read", add_navigation)
    app.connect("build-finished", finish)
