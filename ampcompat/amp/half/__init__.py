"""A model in half precision: its weights and their float32 masters, how its forward runs, how it is saved."""
