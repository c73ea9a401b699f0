"""Loss scaling: the scaler, the block of ``scale_loss``, the gradients between blocks and steps, and the step."""
