"""What explain told of a run, as facts, for its tests: they ask for these, and not for words."""

import json
from dataclasses import dataclass

from internals import observers

from ampcompat.tools.explain import explain_overflows
from ampcompat.tools.explain.observer import OverflowExplainer


@dataclass
class Told:
    """What was told of one run: the lines of JSON, and the counts."""

    faults: list[dict]
    unknown: list[dict]
    counts: dict

    @property
    def first(self):
        return self.faults[0]

    @property
    def last(self):
        return self.faults[-1]

    @property
    def lines(self):
        """The source lines that are named."""
        return [fault.get("source") or "" for fault in self.faults]


def explain(**options):
    """Begin to explain, in lines of JSON."""
    explain_overflows(json=True, **options)


def explainer():
    """Return the observer that ``amp.explain_overflows`` has put in place."""
    (found,) = [observer for observer in observers() if isinstance(observer, OverflowExplainer)]
    return found


def last_words():
    """Return what explain would write if the run ended here: a verdict, and before it what was held back."""
    return explainer().last_words()


def lines_of(text):
    return [json.loads(line) for line in text.splitlines() if line.startswith('{"explain"')]


def told(capsys):
    """What was told, with what a run tells at its end."""
    end = last_words()
    counts = dict(end[0].content) if end else {}
    if "at_end" in counts:
        counts["at_end"] = list(counts["at_end"].values())
    lines = lines_of(capsys.readouterr().err)
    return Told(
        faults=[line for line in lines if line["explain"] == "fault"],
        unknown=[line for line in lines if line["explain"] == "unknown"],
        counts=counts,
    )
