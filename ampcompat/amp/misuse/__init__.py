"""The watch over the first blocks of a run: it looks for mistakes that leave no trace in plain torch."""
