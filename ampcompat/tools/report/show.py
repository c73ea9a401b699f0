"""A precision report as text."""

from __future__ import annotations

from ampcompat.tools.report.facts import Facts, OpCount
from ampcompat.tools.tables import aligned
from ampcompat.tools.words import counted

#: Rows of the table of ops that the text shows; the JSON has all.
ROWS = 30
COLUMNS = ["op", "pass", "dtype", "count", "FLOPs"]


def as_text(facts: Facts) -> str:
    """Sentences, then the ops."""
    level = f"opt_level {facts.opt_level}" if facts.initialized else "amp.initialize was not called"
    head = f"precision report: {level}, half is {facts.half or 'not used by amp'}"
    lines = [head, *(f"  {sentence}" for sentence in facts.sentences)]
    if facts.ops:
        rows = [_row(one) for one in facts.ops[:ROWS]]
        lines += ["", f"ops in {_traced(facts)}"]
        lines += [f"  {line}" for line in aligned([COLUMNS, *rows], ruled=True)]
    if len(facts.ops) > ROWS:
        lines.append(f"  and {len(facts.ops) - ROWS} more: --report=FILE.json has all")
    return "\n".join(lines)


def _row(one: OpCount) -> list[str]:
    return [one.op, one.direction, one.dtype, str(one.count), _flops(one.flops)]


def _traced(facts: Facts) -> str:
    """Of what the ops are."""
    if not facts.traced_steps:
        return "the script, of which no optimizer step was traced"
    return counted(facts.traced_steps, "traced step")


def _flops(flops: int) -> str:
    """With a metric prefix, as in "1.5 G"; "" for an op whose FLOPs are not counted."""
    for limit, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if flops >= limit:
            return f"{flops / limit:.3g} {prefix}"
    return str(flops or "")
