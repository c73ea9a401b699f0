"""Sphinx: ``sphinx-build -W docs docs/_build`` from the root of the tree."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent

project = "ampcompat"
copyright = "the ampcompat authors"
release = re.search(r'__version__ = "(.*)"', (ROOT / "ampcompat" / "__init__.py").read_text())[1]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.doctest", "sphinx.ext.viewcode"]
extensions += ["sphinx_copybutton", "sphinxcontrib.mermaid"]
exclude_patterns = ["_build", "examples"]
html_theme = "furo"
html_title = f"ampcompat {release}"
html_static_path = ["static"]
html_css_files = ["wide.css"]

# Copy the commands of a console block without their prompt and output.
copybutton_prompt_text = "$ "

myst_enable_extensions = ["colon_fence", "deflist"]
myst_fence_as_directive = ["mermaid"]
myst_heading_anchors = 3

autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_member_order = "bysource"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
