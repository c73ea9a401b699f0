"""What amp does for code that wraps models and optimizers: DDP, ``fully_shard``, optimizers around others."""
