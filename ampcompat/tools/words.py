"""Words of messages."""


def counted(number: int, noun: str) -> str:
    """As in "1 step", "2 steps"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
