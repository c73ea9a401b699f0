"""The receipt as a terminal shows it."""

from __future__ import annotations

from ampcompat.tools.columns import aligned
from ampcompat.tools.report.schema import Facts
from ampcompat.tools.report.tables import Table, receipt_tables

#: Rows shown of long tables; the JSON has all.
TOP = 10


def render(facts: Facts) -> str:
    """Sentences, then tables."""
    setting = facts.setting
    head = f"precision receipt: opt_level {setting.opt_level}, half is {setting.half or 'not used'}"
    parts = ["\n".join([head, *(f"  {sentence}" for sentence in facts.sentences)])]
    parts += [_lines(table) for table in receipt_tables(facts, TOP) if table.rows]
    return "\n\n".join(parts)


def _lines(table: Table) -> str:
    """A table with its title."""
    head = [table.columns] if table.columns else []
    lines = aligned([*head, *table.rows], ruled=bool(head))
    return "\n".join([table.title, *(f"  {line}" for line in lines)])
