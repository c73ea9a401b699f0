"""The op lists: which ops run in which dtype at O1, by public torch name, in apex's own three modules.

Scripts edit the lists before ``amp.initialize``, as under apex
(``amp.lists.functional_overrides.FP32_FUNCS.remove("softmax")``), and every ``initialize`` reads them. A name stands
for the op however it is reached: ``softmax`` is ``torch.softmax``, ``Tensor.softmax`` and what ``nn.Softmax`` calls;
``matmul`` is also ``@``, ``pow`` also ``**``. An edit counts for all of these, whichever module's list it was made in:

``FP16_FUNCS`` run in the half dtype in force, ``FP32_FUNCS`` in float32, ``CASTS`` in the widest dtype among the
arguments (in place: in the dtype of the left side), ``SEQUENCE_CASTS`` in the widest among the members of their
sequence.
``BANNED_FUNCS``, pairs of a name and the message of the error, refuse half arguments. A name added to a list leaves the
list it shipped on; on several lists, half beats float32 beats the widest dtype, as apex's wrappers nested. A name
removed and added nowhere runs in the dtype it is given; one on no list from the start follows native autocast.

In-place forms follow: a float32 op (``exp_``) refuses a half left side, which cannot hold the result; a half op
(``addmm_``) casts to the dtype of the left side. :mod:`ampcompat.amp.casts.rules` maps names to ops.
"""

from ampcompat.amp.lists import functional_overrides, tensor_overrides, torch_overrides

__all__ = ["NO_BFLOAT16", "UNCAST", "functional_overrides", "tensor_overrides", "torch_overrides"]

#: On no list of apex: run whole, in the dtype they are given. apex is recorded to have left log1p alone, which native
#: CUDA autocast casts. The others are made inside torch of ops that are cast, whose results do not fit what torch does
#: next: in-place steps (logsumexp, matrix_exp), a backward formula (pinv), weight norm (norm_except_dim); or lose what
#: apex kept, which did not see the product inside (the positions of affine_grid).
UNCAST = ["affine_grid", "log1p", "logsumexp", "matrix_exp", "norm_except_dim", "pinv"]

#: On no list of apex: run in the dtype they are given; but bfloat16 arguments are cast to float32, because torch has no
#: complex numbers made of bfloat16.
NO_BFLOAT16 = ["complex"]
