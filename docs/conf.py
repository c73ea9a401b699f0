"""Sphinx: ``sphinx-build -W docs docs/_build`` from the root of the tree."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent

project = "ampcompat"
copyright = "the ampcompat authors"
release = re.search(r'__version__ = "(.*)"', (ROOT / "ampcompat" / "__init__.py").read_text())[1]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.doctest", "sphinx.ext.viewcode"]
extensions += ["sphinx_copybutton", "sphinxcontrib.mermaid"]
exclude_patterns = ["_build", "description.md", "examples", "templates"]
html_theme = "furo"
html_title = f"ampcompat {release}"
html_static_path = ["static"]
html_css_files = ["wide.css"]

#: Pages that were merged into others or moved, and where their text is. An anchor that a link asks for goes first.
MOVED = {
    "check_machine": "cli#check-a-machine-with-ampcompat-test",
    "checkpoints": "resume#checkpoint-format",
    "copies_and_ema": "resume#keep-a-moving-average",
    "environment": "cli#environment-variables",
    "explain": "debugging#find-the-operation-that-overflowed",
    "benchmarks/gpu_on_paper": "performance",
    "gpu_on_paper": "performance",
    "install": "index",
    "keep_fp32": "debugging#keep-layers-in-float32",
    "migration": "check_and_migrate#rewrite-it",
    "optimizers": "namespace#optimizers-larc-and-amp_c",
    "port": "faq#what-if-an-old-script-fails-for-other-reasons",
    "quickstart": "index",
    "receipt": "performance#see-what-runs-in-half",
    "repositories": "parity#repositories-that-were-run",
    "run": "cli#ampcompat-run",
    "scale_log": "debugging#log-the-loss-scale",
    "security": "stability#load-checkpoints-safely",
    "t5_overflow": "debugging#train-t5-in-float16",
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
