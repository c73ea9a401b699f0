"""The receipt as a terminal shows it."""

from __future__ import annotations

from ampcompat.tools.columns import aligned
from ampcompat.tools.report import tables
from ampcompat.tools.report.schema import Facts
from ampcompat.tools.report.tables import Table

#: Rows shown of long tables; the JSON has all.
TOP = 10


def render(facts: Facts) -> str:
    """Sentences, then tables."""
    setting = facts.setting
    head = f"precision receipt: opt_level {setting.opt_level}, half is {setting.half or 'not used'}"
    shown = [
        tables.passes(facts),
        tables.casts(facts),
        tables.modules(facts, TOP),
        tables.parameters(facts),
        tables.memory(facts),
        tables.wide_products(facts, TOP),
        tables.odd_products(facts, TOP),
        tables.processes(facts),
        tables.run(facts),
    ]
    parts = ["\n".join([head, *(f"  {sentence}" for sentence in facts.sentences)])]
    parts += [_lines(table) for table in shown if table.rows]
    return "\n\n".join(parts)


def _lines(table: Table) -> str:
    """A table with its title."""
    head = [table.columns] if table.columns else []
    lines = aligned([*head, *table.rows], ruled=bool(head))
    return "\n".join([table.title, *(f"  {line}" for line in lines)])
