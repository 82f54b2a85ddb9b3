"""The documentation site: `make docs` builds it into build/site.

The source folder is the checkout itself, so that one relative link works on GitHub and on the site,
and a strict build finds the dead ones.  No page loads anything from elsewhere.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
VERSION = ROOT / "cudalens" / "core" / "version.py"

project = "cudalens"
author = "The cudalens authors"
copyright = "The cudalens authors, Apache-2.0"
release = re.findall(r'__version__ = "(.+)"', VERSION.read_text(encoding="utf-8"))[0]

extensions = ["myst_nb", "sphinx_copybutton"]
root_doc = "docs/index"
include_patterns = ["docs/**", "notebooks/*.ipynb", "CONTRIBUTING.md", "CHANGELOG.md"]
exclude_patterns = ["docs/requirements.txt", "docs/constraints.txt"]

# The outputs that are stored in the notebooks are shown: nothing runs here.
nb_execution_mode = "off"
nb_ipywidgets_js = {}
nb_merge_streams = True
nb_render_error_lexer = "text"
myst_heading_anchors = 4
myst_links_external_new_tab = False
suppress_warnings = ["mystnb.unknown_mime_type"]

html_theme = "furo"
html_title = f"cudalens {release}"
html_static_path = ["_static", "lens_dark.png", "lens_small_dark.png"]
html_css_files = ["site.css"]
html_js_files = ["site.js"]
html_extra_path = ["_extra", "llms.txt"]
html_theme_options = {
    "source_repository": "https://github.com/cudalens/cudalens/",
    "source_branch": "main",
    "source_directory": "",
}
highlight_language = "none"
pygments_style = "github-light"
pygments_dark_style = "github-dark"
copybutton_exclude = ".linenos, .gp, .go"
