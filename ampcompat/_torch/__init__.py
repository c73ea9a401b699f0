"""Every private torch call and every version check of the project.

A change of torch that breaks something is to be fixed here.
"""

from ampcompat._torch.arithmetic import (
    Tensors,
    any_non_finite,
    any_of,
    cast_to,
    coalesced,
    float32_copies,
    foreach_accumulate_,
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
    inverse_of,
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
    at_end_of_backward,
    autocast_nesting,
    in_backward,
    patch_autocast_regions,
    patch_engine,
    patch_function_bodies,
    stash_in_thread,
    stashed_in_thread,
)
from ampcompat._torch.checkpoints import has_distributed_checkpoint, patch_distributed_checkpoint
from ampcompat._torch.chunks import in_chunks
from ampcompat._torch.compiler import (
    COMPILER_SEES_CACHE_FLAG,
    compile_backward_without_autocast,
    eager,
    forget_compiled_graphs,
    in_fake_mode,
    is_tracing,
    keep_torch_functions_traceable,
    run_uncompiled,
    run_untraced,
    setting,
    skip_compile_of_frame,
    tag_compile_caches,
)
from ampcompat._torch.data_parallel import (
    broadcast_elements,
    is_zero,
    parallel_wrapper,
    patch_ddp_constructor,
    patch_ddp_join,
    steps_in_backward,
)
from ampcompat._torch.dispatcher import (
    ATEN,
    RECURRENT_CELLS,
    RECURRENT_LAYERS,
    aten_overloads,
    autocast_device_types,
    autocast_key,
    can_autocast,
    composite,
    convolve_on_cpu_in_float,
    current_node,
    flop_formula,
    halves_without_cpu_convolution,
    innermost_dispatch_mode,
    keys_excluded,
    op_name,
    ops_with_kernel,
    overloads_of,
    register_kernels,
)
from ampcompat._torch.errors import add_note
from ampcompat._torch.fsdp import (
    ShardedUnit,
    any_on_meshes,
    has_shards,
    is_fully_sharded,
    local_part,
    meshes_of,
    sharded_units,
)
from ampcompat._torch.host import (
    HostCopy,
    host_value,
    is_capturing,
    moved_to,
)
from ampcompat._torch.modes import enter_outermost, leave_outermost
from ampcompat._torch.modules import (
    is_graph_module,
    register_state_dict_hooks,
    running_module,
    uncompiled,
    watch_zero_grad,
)
from ampcompat._torch.parameters import (
    DataWrites,
    data_of,
    memory_of,
    set_data,
    set_versions,
    share_attributes,
    watch_collectives,
    watch_parameter_data,
)
from ampcompat._torch.patch import Wrap, replace, replace_function, set_class, with_parameters_of, wrap_everywhere
from ampcompat._torch.processes import store_for
from ampcompat._torch.step_hooks import around_update, call_before_steps, has_step_hooks
from ampcompat._torch.tensors import (
    bits,
    has_storage,
    is_sharded,
    is_uninitialized,
    leave_inference_mode,
    owns_memory_alone,
    tensor_of,
)
from ampcompat._torch.version import (
    TORCH,
)
