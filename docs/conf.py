"""Sphinx: ``sphinx-build -W docs docs/_build`` from the root of the tree."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent

project = "ampcompat"
copyright = "the ampcompat authors"
release = re.search(r'__version__ = "(.*)"', (ROOT / "ampcompat" / "__init__.py").read_text())[1]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.doctest", "sphinx.ext.viewcode"]
extensions += ["sphinx_copybutton", "sphinxcontrib.mermaid"]
exclude_patterns = ["_build", "examples", "templates"]
html_theme = "furo"
html_title = f"ampcompat {release}"
html_static_path = ["static"]
html_css_files = ["wide.css"]

#: Pages that were merged into others or moved: their addresses lead on, with the anchor that was asked for.
MOVED = {
    "checkpoints": "resume",
    "check_machine": "cli",
    "copies_and_ema": "resume",
    "environment": "cli",
    "explain": "debugging",
    "gpu_on_paper": "benchmarks/gpu_on_paper",
    "install": "quickstart",
    "keep_fp32": "debugging",
    "migration": "check_and_migrate",
    "optimizers": "namespace",
    "port": "faq",
    "receipt": "debugging",
    "repositories": "parity",
    "run": "cli",
    "scale_log": "debugging",
    "security": "stability",
    "t5_overflow": "debugging",
}
templates_path = ["templates"]
html_additional_pages = dict.fromkeys(MOVED, "moved.html")
html_context = {"moved": MOVED}

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
