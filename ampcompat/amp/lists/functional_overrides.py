"""Lists of ``torch.nn.functional``, as ``apex/amp/lists/functional_overrides.py`` named them."""

import torch.nn.functional

MODULE = torch.nn.functional

FP16_FUNCS = [
    *("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "conv_tbc"),
    "linear",
]

FP32_FUNCS = [
    # normalisation and resampling
    *("layer_norm", "group_norm", "local_response_norm", "normalize", "cosine_similarity"),
    *("interpolate", "grid_sample"),
    # activations
    *("softmax", "log_softmax", "softmin", "softplus", "gelu"),
    # losses: all of torch's, newer ones than apex included
    *("cosine_embedding_loss", "cross_entropy", "ctc_loss", "gaussian_nll_loss", "hinge_embedding_loss", "huber_loss"),
    *("kl_div", "l1_loss", "margin_ranking_loss", "mse_loss", "multi_margin_loss", "multilabel_margin_loss"),
    *("multilabel_soft_margin_loss", "nll_loss", "poisson_nll_loss", "smooth_l1_loss", "soft_margin_loss"),
    *("triplet_margin_loss", "triplet_margin_with_distance_loss", "binary_cross_entropy_with_logits"),
]

BANNED_FUNCS = [
    (
        "binary_cross_entropy",
        "binary_cross_entropy got a half argument: amp refuses it, since the loss of a half probability near 0 or 1"
        " overflows. Use binary_cross_entropy_with_logits (BCEWithLogitsLoss) without the sigmoid; or, if the sigmoid"
        " must stay, call amp.register_float_function(torch, 'sigmoid') before amp.initialize.",
    )
]
