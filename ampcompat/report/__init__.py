"""The precision receipt: what really ran, in which dtype, and what half precision brought."""

from __future__ import annotations

from ampcompat.report.receipt import Receipt

__all__ = ["Receipt", "report"]


def report(steps: int = 3) -> Receipt:
    """Observe what runs from here on.

    Every op of the first ``steps`` optimizer steps is counted, below autocast, where its dtype is what the device sees;
    compiled code runs eagerly in them. Afterwards only steps, skips and loss scales are noted, without host syncs.

    Args:
        steps: Optimizer steps whose ops are counted.

    Returns:
        The receipt: ``print(receipt)``, ``receipt.write("receipt.html")`` (or .json, .txt), ``receipt.facts()``.

    Raises:
        ValueError: ``steps`` is not a positive integer.
    """
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise ValueError(f"report(steps={steps!r}) - it must be a positive integer - pass 3 for instance.")
    receipt = Receipt(steps)
    receipt.start()
    return receipt
