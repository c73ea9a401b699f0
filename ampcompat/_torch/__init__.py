"""Every private torch call and every version check of the project.

When a new torch breaks something, this is the place to mend.
"""

from ampcompat._torch.arithmetic import (
    HostCopy,
    cast_to,
    coalesced,
    float32_copies,
    foreach_add,
    foreach_add_,
    foreach_copy_,
    foreach_div,
    foreach_div_,
    foreach_mul,
    foreach_mul_,
    foreach_norm,
    foreach_sqrt,
    foreach_sqrt_,
    foreach_sub_,
    found_inf_and_scale,
    fused_adam_,
    fused_adamw_,
    fused_float32_copies,
    fused_sgd_,
    has_fused_kernels,
    host_value,
    is_capturing,
    is_window,
    sum_of,
    unscale_and_check_,
    update_scale_,
    widened,
    without_grad,
)
from ampcompat._torch.autograd import (
    CACHES_WEIGHTS_ACROSS_GRAD_MODES,
    accelerator,
    autocast_nesting,
    patch_autocast_regions,
    patch_engine,
    patch_function_bodies,
)
from ampcompat._torch.compiler import (
    COMPILER_SEES_CACHE_FLAG,
    compile_backward_without_autocast,
    eager,
    eager_itself,
    forget_compiled_graphs,
    in_fake_mode,
    run_uncompiled,
    run_untraced,
    setting,
    tag_compile_caches,
)
from ampcompat._torch.dispatcher import (
    ATEN,
    RECURRENT_CELLS,
    RECURRENT_LAYERS,
    aten_overloads,
    autocast_device_types,
    autocast_key,
    composite,
    convolve_on_cpu_in_float,
    current_node,
    flop_formula,
    halves_without_cpu_convolution,
    has_kernel,
    innermost_dispatch_mode,
    keys_excluded,
    op_name,
    ops_with_kernel,
    out_forms_run_whole,
    overloads_of,
    register_kernels,
)
from ampcompat._torch.errors import add_note, cure_of, note_cure, raised_in
from ampcompat._torch.host_memory import keep_freed_memory
from ampcompat._torch.modules import (
    AnyDeviceDDP,
    bits,
    buffers_keyword,
    fingerprint,
    has_storage,
    inner_optimizers,
    is_sharded,
    is_uninitialized,
    is_zero,
    owns_memory_alone,
    parallel_wrapper,
    params_by_rank,
    patch_ddp_constructor,
    put_back,
    register_state_dict_hooks,
    separate_inner_groups,
    steps_in_backward,
    tensor_of,
    uncompiled,
)
from ampcompat._torch.patch import Wrap, replace, replace_function, wrap_everywhere
from ampcompat._torch.version import (
    TORCH,
)
