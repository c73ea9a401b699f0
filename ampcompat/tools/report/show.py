"""A precision report as text and as a page."""

from __future__ import annotations

from dataclasses import asdict

from ampcompat.tools.data import plain
from ampcompat.tools.report import tables
from ampcompat.tools.report.facts import Facts

#: Rows shown of long tables; the JSON has all.
ROWS_OF_TEXT = 10
ROWS_OF_PAGE = 20


def as_text(facts: Facts) -> str:
    """Sentences, then tables."""
    setting = facts.setting
    head = f"precision report: opt_level {setting.opt_level}, half is {setting.half or 'not used'}"
    parts = ["\n".join([head, *(f"  {sentence}" for sentence in facts.sentences)])]
    parts += [table.text() for table in tables.report_tables(facts, ROWS_OF_TEXT) if table.rows]
    return "\n\n".join(parts)


def as_page(facts: Facts, whole: bool = True) -> str:
    """The page with the data in it; or a part of another page, whose own looks it leaves alone."""
    from jinja2 import Environment, PackageLoader, StrictUndefined  # torch brings it along

    # Names of modules and of files, and messages of errors, are anybody's.
    loader = PackageLoader("ampcompat.tools.report", package_path="")
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined)
    environment.policies["json.dumps_kwargs"] = {}  # the keys in their order
    return environment.get_template("page.html").render(
        facts=facts,
        data=plain(asdict(facts)),
        scale_plot=_scale_plot(facts),
        tables=[*tables.report_tables(facts, ROWS_OF_PAGE), tables.parameters_by_module(facts)],
        whole=whole,
    )


def _scale_plot(facts: Facts) -> str | None:
    """The loss scale as an SVG in base64; "" for none, None without matplotlib."""
    if not facts.setting.half or not any(step.scales for step in facts.history):
        return ""
    try:
        from ampcompat.tools.pictures import loss_scales
    except ImportError:
        return None
    return loss_scales(facts.history)
