"""A precision report as text and as a page."""

from __future__ import annotations

from dataclasses import asdict

from ampcompat.tools.data import plain
from ampcompat.tools.report import tables
from ampcompat.tools.report.facts import Counts, Facts

#: Rows shown of long tables, and bars of a plot; the JSON has all.
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
        plots=_plots(facts),
        tables=[*tables.report_tables(facts, ROWS_OF_PAGE), tables.parameters_by_module(facts)],
        whole=whole,
    )


def _plots(facts: Facts) -> list[object] | None:
    """The plots; None without matplotlib."""
    try:
        from ampcompat.tools.pictures import Bar, bars, loss_scales
    except ImportError:
        return None
    steps, each = tables.unit(facts)

    def bar(label: str, flops: Counts) -> Bar:
        sizes = {dtype: count / steps for dtype, count in flops.items()}
        return Bar(label, sizes, tables.flops_text(sum(sizes.values())))

    plots: list[object] = []
    by_pass = [bar(direction, flops) for direction, flops in facts.flops.items() if flops]
    if by_pass:
        plots.append(bars(f"FLOPs {each}", by_pass))
    if facts.modules:
        by_module = [bar(one.module, one.flops) for one in facts.modules[:ROWS_OF_PAGE]]
        plots.append(bars(f"Forward FLOPs {each}, by module", by_module))
    if facts.setting.half and any(step.scales for step in facts.history):
        plots.append(loss_scales("Loss scale", facts.history))
    return plots
