"""The receipt as one page that needs nothing else: no script, no font, no network. Needs jinja2."""

from __future__ import annotations

import functools
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from ampcompat.tools.data import as_data
from ampcompat.tools.report import tables
from ampcompat.tools.report.schema import Facts

#: Rows shown of long tables; the data in the page has all.
TOP = 20
NO_PLOTS = "No plots: matplotlib is missing - pip install 'ampcompat[report]'."


def render(facts: Facts) -> str:
    """The whole page, with the data in it."""
    return _environment().get_template("page.html").render(_shown(facts), data=as_data(facts))


def fragment(facts: Facts) -> str:
    """The same as a part of another page, whose own looks it leaves alone."""
    return _environment().get_template("fragment.html").render(_shown(facts))


@functools.cache
def _environment() -> Environment:
    # Names of modules and of files, and messages of errors, are anybody's.
    environment = Environment(
        loader=PackageLoader("ampcompat.tools.report"), autoescape=True, undefined=StrictUndefined
    )
    environment.policies["json.dumps_kwargs"] = {}  # the keys in their order
    return environment


def _shown(facts: Facts) -> dict[str, Any]:
    """What the templates are given."""
    try:
        from ampcompat.tools.report.plots import plots
    except ImportError:
        drawn = None
    else:
        drawn = plots(facts)
    return {
        "facts": facts,
        "plots": drawn or [],
        "no_plots": NO_PLOTS if drawn is None else "",
        "tables": [*tables.receipt_tables(facts, TOP), tables.parameters_by_module(facts)],
    }
