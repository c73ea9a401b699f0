"""Words of messages."""


def counted(number: int, noun: str) -> str:
    """As in "1 step", "2 steps"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def were(number: int) -> str:
    """What comes after so many of a thing: "was" or "were"."""
    return "was" if number == 1 else "were"
