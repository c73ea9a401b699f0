"""Mixed precision as ``apex.amp`` offered it."""
