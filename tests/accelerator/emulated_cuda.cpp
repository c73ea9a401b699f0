// Two CUDA devices on a machine without one: their memory is the host's, and their kernels are those of the CPU.
//
// For a torch that was built without CUDA. What torch itself does around kernels is torch's own: the threads of the
// autograd engine, the routes of its optimizers, streams, events. What the devices do is logged, one line each: kernels,
// host syncs, asynchronous copies. Nothing here says anything about time or about CUDA's arithmetic.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/ForeachUtils.h>
#include <ATen/native/TensorFactories.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <deque>
#include <mutex>
#include <set>

namespace {

using at::Tensor;
using c10::Device;
using c10::IValue;
using Stack = torch::jit::Stack;

constexpr auto CUDA = c10::DeviceType::CUDA;
constexpr int DEVICES = 2;

thread_local int device_now = 0;
thread_local int64_t streams_now[DEVICES] = {};
std::recursive_mutex mutex;  // for everything below; held by no one while a kernel runs
using Lock = std::lock_guard<std::recursive_mutex>;

bool is_there(const Tensor& tensor) { return tensor.defined() && tensor.device().type() == CUDA; }
int index_of(Device device) { return device.has_index() ? device.index() : device_now; }
std::pair<int, int64_t> stream_on(int device) { return {device, streams_now[device]}; }

bool starts_with(const std::string& text, const char* start) { return text.rfind(start, 0) == 0; }

// ---- the log -------------------------------------------------------------------------------------------------------
bool is_logging = false;
std::vector<std::string> log_lines;  // kind, name, device, route, numels of each list, separated by tabs

void log(const char* kind, const std::string& name, int device, const std::string& route = "", const std::string& numels = "") {
  Lock lock(mutex);
  if (is_logging)
    log_lines.push_back(std::string(kind) + "\t" + name + "\t" + std::to_string(device) + "\t" + route + "\t" + numels);
}

// ---- CUDA graphs: a capture executes nothing, a replay runs the kernels that were recorded ---------------------------
struct Recorded {
  c10::OperatorHandle op;
  Stack arguments;              // host views of the memory that the kernel reads and writes
  std::vector<Tensor> results;  // host views of the memory that the captured call has returned
};
std::vector<std::vector<Recorded>> graphs;
bool is_capturing = false;
std::map<const void*, std::pair<c10::Storage, std::string>> before_capture;

void record_kernel(const c10::OperatorHandle& op, Stack arguments, std::vector<Tensor> results) {
  Lock lock(mutex);
  if (is_capturing) graphs.back().push_back({op, std::move(arguments), std::move(results)});
}
// What a kernel writes while it is captured is put back at the end.
void about_to_write(const Tensor& tensor) {
  Lock lock(mutex);
  if (!is_capturing || !tensor.storage().nbytes()) return;
  auto* bytes = static_cast<const char*>(tensor.storage().data());
  if (!before_capture.count(bytes))
    before_capture.emplace(bytes, std::make_pair(tensor.storage(), std::string(bytes, tensor.storage().nbytes())));
}
void refuse_in_capture(const std::string& what) {
  TORCH_CHECK(!is_capturing, "CUDA error: operation not permitted when stream is capturing (", what, ")");
}

// ---- host syncs ------------------------------------------------------------------------------------------------------
int64_t sync_debug_mode = 0;

void host_waits(const std::string& what, int device) {
  refuse_in_capture(what);
  if (sync_debug_mode == 1) TORCH_WARN("called a synchronizing CUDA operation");
  TORCH_CHECK(sync_debug_mode != 2, "called a synchronizing CUDA operation (", what, ")");
  log("sync", what, device);
}

// ---- asynchronous copies to pinned memory: until they arrive it holds NaN --------------------------------------------
struct LateCopy {
  std::pair<int, int64_t> stream;
  int64_t number;
  Tensor destination, source;
};
std::vector<LateCopy> late_copies;
int64_t copies_issued = 0;
int64_t late_queries = -1;  // how often an event says that it has not come; negative: copies are not late

void arrive(std::pair<int, int64_t> stream, int64_t until = INT64_MAX) {
  Lock lock(mutex);
  std::vector<LateCopy> waiting;
  for (auto& copy : late_copies) {
    if (copy.stream == stream && copy.number <= until) copy.destination.copy_(copy.source);
    else waiting.push_back(copy);
  }
  late_copies.swap(waiting);
}
void arrive_from(int device) {
  Lock lock(mutex);
  for (auto& copy : std::vector<LateCopy>(late_copies)) if (copy.stream.first == device) arrive(copy.stream);
}

// ---- memory ----------------------------------------------------------------------------------------------------------
int64_t bytes_held = 0, bytes_peak = 0;

struct Block {
  c10::DataPtr memory;
  int64_t size;
};
void free_block(void* pointer) {
  auto* block = static_cast<Block*>(pointer);
  { Lock lock(mutex); bytes_held -= block->size; }
  delete block;
}
c10::DataPtr device_memory(c10::DataPtr memory, size_t size, int device) {
  Lock lock(mutex);
  bytes_held += size;
  bytes_peak = std::max(bytes_peak, bytes_held);
  void* address = memory.get();
  return {address, new Block{std::move(memory), static_cast<int64_t>(size)}, &free_block, Device(CUDA, device)};
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    auto memory = c10::GetAllocator(c10::kCPU)->allocate(size);
    if (size) memset(memory.get(), 0xff, size);  // NaN: who reads what nobody has written is found out
    return device_memory(std::move(memory), size, device_now);
  }
  void copy_data(void* to, const void* from, size_t size) const override { memcpy(to, from, size); }
} device_allocator;

std::set<const void*> pinned;
void free_pinned(void* pointer) {
  { Lock lock(mutex); pinned.erase(pointer); }
  free(pointer);
}
struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* pointer = malloc(size + 1);
    Lock lock(mutex);
    pinned.insert(pointer);
    return {pointer, pointer, &free_pinned, Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t size) const override { memcpy(to, from, size); }
} pinned_allocator;

bool is_pinned(const void* pointer) { Lock lock(mutex); return pinned.count(pointer); }

// ---- what torch asks of a device type ----------------------------------------------------------------------------------
struct Event {
  std::pair<int, int64_t> stream;
  int64_t number, queries_left;
  bool has_come;
};
int64_t streams_made = 0;

c10::Stream stream(Device device, int64_t id) {
  return c10::Stream(c10::Stream::UNSAFE, Device(CUDA, index_of(device)), id);
}

// Methods without `override` are those that not every torch has.
#pragma GCC diagnostic ignored "-Wsuggest-override"
#pragma GCC diagnostic ignored "-Winconsistent-missing-override"
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return CUDA; }
  Device exchangeDevice(Device device) const override {
    Device before = getDevice();
    setDevice(device);
    return before;
  }
  Device getDevice() const override { return Device(CUDA, device_now); }
  void setDevice(Device device) const override {
    TORCH_CHECK(index_of(device) < DEVICES, "CUDA error: invalid device ordinal");
    device_now = index_of(device);
  }
  void uncheckedSetDevice(Device device) const noexcept override { device_now = index_of(device); }
  c10::DeviceIndex deviceCount() const noexcept override { return DEVICES; }

  c10::Stream getStream(Device device) const noexcept override { return stream(device, streams_now[index_of(device)]); }
  c10::Stream getDefaultStream(Device device) const override { return stream(device, 0); }
  c10::Stream getNewStream(Device device, int = 0) const override { Lock lock(mutex); return stream(device, ++streams_made); }
  c10::Stream getStreamFromGlobalPool(Device device, bool = false) const override { return getNewStream(device); }
  c10::Stream exchangeStream(c10::Stream next) const noexcept override {
    auto before = getStream(next.device());
    streams_now[next.device_index()] = next.id();
    return before;
  }
  bool queryStream(const c10::Stream&) const override { refuse_in_capture("stream query"); return true; }
  bool isStreamCapturing(const c10::Stream&) const { return is_capturing; }
  void synchronizeStream(const c10::Stream& stream) const override {
    refuse_in_capture("stream.synchronize");
    log("sync", "stream.synchronize", stream.device_index());
    arrive({stream.device_index(), stream.id()});
  }
  void synchronizeDevice(const c10::DeviceIndex device) const {
    refuse_in_capture("synchronize");
    log("sync", "synchronize", device);
    arrive_from(device);
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    Lock lock(mutex);
    if (!*event) *event = new Event();
    *static_cast<Event*>(*event) = {{stream.device_index(), stream.id()}, copies_issued, std::max<int64_t>(late_queries, 0), false};
  }
  void block(void*, const c10::Stream&) const override {}  // all work is done when it is issued
  bool queryEvent(void* pointer) const override {
    refuse_in_capture("event query");
    if (!pointer) return true;
    auto* event = static_cast<Event*>(pointer);
    if (event->queries_left-- > 0) return false;
    arrive(event->stream, event->number);
    return event->has_come = true;
  }
  void synchronizeEvent(void* pointer) const override {
    auto* event = static_cast<Event*>(pointer);
    refuse_in_capture("event.synchronize");
    if (event && event->has_come) return;
    log("sync", "event.synchronize", event ? event->stream.first : device_now);
    if (event) arrive(event->stream, event->number);
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
  double elapsedTime(void*, void*, const c10::DeviceIndex) const { return 1.0; }
} guard;

std::vector<at::Generator> generators;

struct Hooks final : at::CUDAHooksInterface {
  void init() const {}
  bool isBuilt() const { return true; }
  bool isAvailable() const { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool isPinnedPtr(const void* pointer) const override { return is_pinned(pointer); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  c10::Allocator* getCUDADeviceAllocator() const override { return &device_allocator; }
  Device getDeviceFromPtr(void*) const override { return Device(CUDA, device_now); }
  c10::DeviceIndex deviceCount() const override { return DEVICES; }
  c10::DeviceIndex getCurrentDevice() const override { return device_now; }
  int getNumGPUs() const override { return DEVICES; }
  // The devices draw from the CPU's generators: its default one, and those that were made for them.
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const { return at::globalContext().defaultGenerator(c10::kCPU); }
  at::Generator getNewGenerator(c10::DeviceIndex = -1) const {
    Lock lock(mutex);
    return generators.emplace_back(at::detail::createCPUGenerator());
  }
};

void check_generator(const at::Generator& generator) {
  Lock lock(mutex);
  bool is_ours = generator == at::globalContext().defaultGenerator(c10::kCPU) || std::find(generators.begin(), generators.end(), generator) != generators.end();
  TORCH_CHECK(is_ours, "Expected a 'cuda' device type for generator but found 'cpu'");
}

// ---- one memory, seen from both sides ----------------------------------------------------------------------------------
Tensor laid_out_as(Tensor made, const Tensor& like) {
  made.unsafeGetTensorImpl()->set_storage_offset(like.storage_offset());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides());
  return made;
}
Tensor tensor_of(c10::Storage storage, c10::DispatchKey key, const Tensor& like) {
  return laid_out_as(at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype()), like);
}
Tensor view_of(const Tensor& base, const Tensor& like) {
  return laid_out_as(at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(base.storage()), base.key_set(), like.dtype()), like);
}
Tensor host_view(const Tensor& tensor) {
  auto* kept = new c10::Storage(tensor.storage());
  c10::DataPtr memory(kept->mutable_data(), kept, [](void* held) { delete static_cast<c10::Storage*>(held); }, c10::kCPU);
  c10::Storage storage(c10::Storage::use_byte_size_t(), kept->nbytes(), std::move(memory), c10::GetAllocator(c10::kCPU), true);
  Tensor view = tensor_of(std::move(storage), c10::DispatchKey::CPU, tensor);
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) view.unsafeGetTensorImpl()->set_wrapped_number(true);
  return view;
}
c10::Storage as_device_storage(const c10::Storage& host, int device) {
  auto* kept = new c10::Storage(host);
  c10::DataPtr memory(kept->mutable_data(), kept, [](void* held) { delete static_cast<c10::Storage*>(held); }, c10::kCPU);
  return c10::Storage(c10::Storage::use_byte_size_t(), host.nbytes(), device_memory(std::move(memory), host.nbytes(), device), &device_allocator, true);
}

// ---- any kernel: the CPU's, on host views ------------------------------------------------------------------------------
const std::set<std::string> WAITING = {"aten::equal", "aten::nonzero", "aten::nonzero.out", "aten::masked_select", "aten::_unique2",
                                       "aten::unique_dim", "aten::unique_consecutive", "aten::bincount"};
const std::set<std::string> TAKES_HOST_TENSORS = {"aten::index.Tensor", "aten::index_put_", "aten::_index_put_impl_", "aten::_ctc_loss.Tensor"};

// What the CPU computes and CUDA refuses, by dtype. For the ops of OpInfo (torch/testing/_internal), `dtypes` less
// `dtypesIfCUDA`; the last row is AT_DISPATCH_FLOATING_TYPES_AND_HALF in ATen/native/cuda/AmpKernels.cu.
const std::set<at::ScalarType> HALVES = {at::kHalf, at::kBFloat16};
const std::set<at::ScalarType> INTEGERS = {at::kByte, at::kChar, at::kShort, at::kInt, at::kLong};
const std::map<std::string, std::set<at::ScalarType>> LACKING = [] {
  std::map<std::string, std::set<at::ScalarType>> lacking;
  for (auto op : {"mm", "addmm", "bmm", "baddbmm", "addbmm", "addmv", "mv", "dot", "vdot", "max_pool2d_with_indices", "max_pool3d_with_indices", "native_dropout_backward"})
    lacking[op] = INTEGERS;
  for (auto op : {"avg_pool2d", "avg_pool3d", "convolution"}) lacking[op] = {at::kLong};
  for (auto op : {"upsample_bilinear2d", "upsample_bicubic2d", "_upsample_bilinear2d_aa"}) lacking[op] = {at::kByte};
  for (auto op : {"igamma", "igammac", "angle", "histc"}) lacking[op] = HALVES;
  lacking["_amp_foreach_non_finite_check_and_unscale_"] = {at::kBFloat16};
  return lacking;
}();
// Ops that torchgen's native_functions.yaml gives a kernel on the CPU and none on CUDA.
const std::set<std::string> ON_THE_CPU_ALONE = {"aten::histogram", "aten::_histogramdd_bin_edges", "aten::_histogramdd_from_bin_cts", "aten::_histogramdd_from_bin_tensors",
                                                "aten::_add_relu", "aten::_add_relu_", "aten::slow_conv3d_forward", "aten::mkldnn_rnn_layer",
                                                "aten::to_mkldnn", "aten::_scaled_dot_product_flash_attention_for_cpu", "aten::_upsample_lanczos2d_aa"};

// The name of `op` without its overload, its namespace, and the mark of a call in place.
std::string plain_name(const c10::FunctionSchema& schema) {
  std::string name = schema.name().substr(strlen("aten::"));
  if (LACKING.count(name) || name.empty() || name.back() != '_') return name;
  name.pop_back();
  return name;
}

// Calls `visit(tensor)` for each tensor among the values; what it returns takes the tensor's place.
template <class Visit>
IValue map_tensors(const IValue& value, Visit visit) {
  if (value.isTensor()) return visit(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> mapped;
    for (const Tensor& tensor : value.toTensorVector()) mapped.push_back(visit(tensor));
    return mapped;
  }
  if (value.isList() && value.toList().elementType()->kind() == c10::TypeKind::OptionalType) {
    c10::List<std::optional<Tensor>> mapped;
    for (const IValue& item : value.toList().vec())
      mapped.push_back(item.isNone() ? std::nullopt : std::optional<Tensor>(visit(item.toTensor())));
    return mapped;
  }
  return value;
}

struct Call {
  const c10::OperatorHandle& op;
  const c10::FunctionSchema& schema;
  std::string name;
  Stack given;
  int device = -1;
  std::vector<std::pair<Tensor, Tensor>> views;  // a tensor of the device, and its host view

  Call(const c10::OperatorHandle& op, Stack arguments) : op(op), schema(op.schema()), given(std::move(arguments)) {
    name = schema.name();
    if (!schema.overload_name().empty()) name += "." + schema.overload_name();
  }
  bool is_foreach() const { return starts_with(name, "aten::_foreach_"); }
  bool goes_by_lists() const { return is_foreach() || starts_with(name, "aten::_amp_foreach_"); }
  bool writes(size_t argument) const {
    auto* alias = schema.arguments()[argument].alias_info();
    return alias && alias->isWrite();
  }
  bool writes_any() const {
    for (size_t i = 0; i < given.size(); ++i) if (writes(i)) return true;
    return false;
  }
  bool is_view() const {  // returns a part of what it was given
    auto* alias = schema.returns().empty() ? nullptr : schema.returns()[0].alias_info();
    return alias && !alias->isWrite();
  }
  std::vector<std::vector<Tensor>> lists() const {
    std::vector<std::vector<Tensor>> found;
    for (const IValue& value : given) if (value.isTensorList()) found.push_back(value.toTensorVector());
    return found;
  }

  // Whether CUDA would take the lists of a foreach op in a few launches, or else tensor by tensor.
  bool has_fast_route() const {
    auto all = lists();
    std::vector<at::TensorList> views(all.begin(), all.end());
    bool may_differ_in_dtype = name == "aten::_foreach_copy_";
    return at::native::_check_tensors_share_device_and_dtype(views, may_differ_in_dtype) && at::native::_check_tensors_share_sizes_and_strides(views) && has_factor_of_its_dtype(all);
  }
  // One tensor for a whole list goes along with a launch if it is of the list's dtype.
  bool has_factor_of_its_dtype(const std::vector<std::vector<Tensor>>& lists) const {
    if (schema.overload_name() != "Tensor" || given.size() < 2 || !given[1].isTensor()) return true;
    return lists.empty() || lists[0].empty() || lists[0][0].scalar_type() == given[1].toTensor().scalar_type();
  }

  // Find the device; raise where CUDA would, since tensors of two devices meet.
  void check_devices() {
    bool is_fused = starts_with(name, "aten::_amp_") || starts_with(name, "aten::_fused_");
    std::string other;
    for (size_t i = 0; i < given.size(); ++i) {
      bool may_be_host = schema.arguments()[i].name() == "lr" || TAKES_HOST_TENSORS.count(name);
      map_tensors(given[i], [&](const Tensor& tensor) {
        if (!tensor.defined()) return tensor;
        if (is_there(tensor)) {
          if (device < 0) device = tensor.device().index();
          if (device != tensor.device().index()) other = tensor.device().str();
        } else if ((tensor.dim() > 0 || is_fused) && !may_be_host) {
          other = tensor.device().str();
        }
        return tensor;
      });
      if (given[i].isDevice() && device < 0) device = index_of(given[i].toDevice());
      if (given[i].isGenerator()) check_generator(given[i].toGenerator());
    }
    if (device < 0) device = device_now;
    if (!other.empty() && is_foreach()) {  // tensor by tensor, each on the device of its place
      auto all = lists();
      other.clear();
      for (auto& list : all) for (size_t i = 0; i < list.size() && i < all[0].size(); ++i)
        if (list[i].device() != all[0][i].device() && list[i].dim() > 0) other = list[i].device().str();
    }
    TORCH_CHECK(other.empty(), "Expected all tensors to be on the same device, but found at least two devices, cuda:", device, " and ", other, "! (", name, ")");
  }

  // Raise where CUDA has no kernel for the dtype of a tensor.
  void check_dtypes() const {
    auto lacking = LACKING.find(plain_name(schema));
    if (lacking == LACKING.end()) return;
    auto check = [&](const Tensor& tensor) {
      if (is_there(tensor))
        TORCH_CHECK_NOT_IMPLEMENTED(!lacking->second.count(tensor.scalar_type()), '"', schema.name(), "\" not implemented for '", c10::toString(tensor.scalar_type()), "'");
      return tensor;
    };
    map_tensors(given[0], check);  // the others have its dtype, or are indices
  }

  void log_kernel() const {
    if (WAITING.count(name)) host_waits(name, device);
    std::string numels;
    for (const IValue& value : given) {
      std::string list;
      map_tensors(value, [&](const Tensor& tensor) {
        bool is_mask = tensor.defined() && tensor.scalar_type() == at::kBool && starts_with(name, "aten::index") && !value.isTensor();
        if (is_mask) host_waits(name + " (mask)", device);
        if (is_logging && is_there(tensor)) list += (list.empty() ? "" : ",") + std::to_string(tensor.numel());
        return tensor;
      });
      if (!list.empty()) numels += (numels.empty() ? "" : ";") + list;
    }
    log("kernel", name, device, goes_by_lists() && !has_fast_route() ? "slow" : "", numels);
  }

  void note_writes() const {
    for (size_t i = 0; i < given.size(); ++i) {
      if (!writes(i)) continue;
      map_tensors(given[i], [&](const Tensor& tensor) {
        if (!is_there(tensor)) return tensor;
        about_to_write(tensor);
        if (is_foreach() && !tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();  // as CUDA's kernels do
        return tensor;
      });
    }
  }

  Stack host_arguments() {
    Stack arguments;
    for (const IValue& value : given) {
      if (value.isDevice()) { arguments.push_back(Device(c10::kCPU)); continue; }
      arguments.push_back(map_tensors(value, [&](const Tensor& tensor) {
        if (!is_there(tensor)) return tensor;
        views.emplace_back(tensor, host_view(tensor));
        return views.back().second;
      }));
    }
    return arguments;
  }

  void run_on_cpu(Stack& stack) const {
    c10::Dispatcher::singleton().redispatchBoxed(op, c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
  }

  // Run the CPU's kernel, in float32 where it has none in half; `narrow` is then the dtype of the results.
  Stack run(const Stack& arguments, std::optional<at::ScalarType>& narrow) const {
    Stack stack = arguments;
    bool is_softmax = name == "aten::_softmax" || name == "aten::_log_softmax";
    if (is_softmax && stack[2].toBool()) {  // half to float: CUDA's alone
      stack[0] = stack[0].toTensor().to(at::kFloat);
      stack[2] = false;
    }
    if (name == "aten::_softmax_backward_data" || name == "aten::_log_softmax_backward_data") {
      auto input_dtype = stack[3].toScalarType(), grad_dtype = stack[0].toTensor().scalar_type();
      if (input_dtype != grad_dtype) { narrow = input_dtype; stack[3] = static_cast<int64_t>(grad_dtype); }
    }
    try {
      run_on_cpu(stack);
    } catch (const std::exception& error) {
      bool has_no_kernel = std::string(error.what()).find("not implemented for '") != std::string::npos;
      if (!has_no_kernel || writes_any()) throw;
      stack.clear();
      for (const IValue& value : arguments) {
        stack.push_back(map_tensors(value, [&](const Tensor& tensor) {
          if (!tensor.defined() || (tensor.scalar_type() != at::kHalf && tensor.scalar_type() != at::kBFloat16)) return tensor;
          narrow = tensor.scalar_type();
          return tensor.to(at::kFloat);
        }));
      }
      run_on_cpu(stack);
    }
    return stack;
  }

  Tensor on_device(Tensor result, std::optional<at::ScalarType> narrow, std::vector<Tensor>& fresh) const {
    if (!result.defined()) return result;
    if (narrow && result.scalar_type() == at::kFloat) result = result.to(*narrow);
    for (auto& [tensor, view] : views)  // a view, or the argument itself
      if (result.storage().data() && result.storage().data() == tensor.storage().data())
        return view_of(tensor, result);
    fresh.push_back(result);
    return tensor_of(as_device_storage(result.storage(), device), c10::DispatchKey::CUDA, result);
  }

  void return_results(const Stack& results, std::optional<at::ScalarType> narrow, std::vector<Tensor>& fresh, Stack* out) const {
    for (size_t i = 0; i < results.size(); ++i) {
      auto* alias = schema.returns()[i].alias_info();
      if (alias && alias->isWrite()) {  // in place: return the argument itself
        size_t at = 0;
        while (!writes(at) || !(*schema.arguments()[at].alias_info() == *alias)) ++at;
        out->push_back(given[at]);
      } else {
        out->push_back(map_tensors(results[i], [&](const Tensor& tensor) { return on_device(tensor, narrow, fresh); }));
      }
    }
  }

  void follow_resized() const {  // what an out= argument has become
    for (auto& [tensor, view] : views) {
      if (view.sizes() == tensor.sizes() && view.storage().data() == tensor.storage().data()) continue;
      auto* impl = tensor.unsafeGetTensorImpl();
      impl->set_storage_keep_dtype(as_device_storage(view.storage(), device));
      impl->set_storage_offset(view.storage_offset());
      impl->set_sizes_and_strides(view.sizes(), view.strides());
    }
  }
};

void any_kernel(const c10::OperatorHandle& op, Stack* stack) {
  size_t count = op.schema().arguments().size();
  Call call(op, Stack(stack->end() - count, stack->end()));
  stack->resize(stack->size() - count);
  call.check_devices();
  call.check_dtypes();
  if (!call.is_view()) call.log_kernel();
  call.note_writes();
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  at::AutoDispatchBelowADInplaceOrView no_autograd;
  Stack arguments = call.host_arguments();
  std::optional<at::ScalarType> narrow;
  std::vector<Tensor> fresh;
  Stack results = call.run(arguments, narrow);
  call.return_results(results, narrow, fresh, stack);
  call.follow_resized();
  if (!call.is_view()) record_kernel(op, std::move(arguments), std::move(fresh));
}

// ---- what no kernel of the CPU does --------------------------------------------------------------------------------------
using MaybeDtype = std::optional<at::ScalarType>;
using MaybeLayout = std::optional<at::Layout>;
using MaybeDevice = std::optional<Device>;

Tensor empty(at::IntArrayRef size, MaybeDtype dtype, MaybeLayout, MaybeDevice device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard on(Device(CUDA, index_of(device.value_or(CUDA))));
  return at::detail::empty_generic(size, &device_allocator, c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(dtype), format);
}
Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, MaybeDtype dtype, MaybeLayout, MaybeDevice device, std::optional<bool>) {
  c10::DeviceGuard on(Device(CUDA, index_of(device.value_or(CUDA))));
  return at::detail::empty_strided_generic(size, stride, &device_allocator, c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(dtype));
}

at::Scalar local_scalar(const Tensor& tensor) {
  host_waits("aten::_local_scalar_dense", tensor.device().index());
  arrive(stream_on(tensor.device().index()));
  return host_view(tensor).item();
}

// A copy between host and device; whether it has been put off.
bool transfer(Tensor& to, const Tensor& from, bool non_blocking) {
  bool to_device = is_there(to);
  int device = (to_device ? to : from).device().index();
  std::string what = to_device ? "host to device" : "device to host";
  if (!non_blocking) {
    host_waits(what, device);
    arrive(stream_on(device));
    return false;
  }
  bool is_async = is_pinned((to_device ? from : to).storage().data());
  if (!is_async) refuse_in_capture(what + ", pageable memory");
  log("copy", what + (is_async ? ", pinned" : ", pageable"), device);
  Lock lock(mutex);
  if (to_device || !is_async || late_queries < 0 || is_capturing) return false;
  late_copies.push_back({stream_on(device), ++copies_issued, to, host_view(from).clone()});
  memset(to.data_ptr(), 0xff, to.nbytes());
  return true;
}

Tensor& copy_(Tensor& to, const Tensor& from, bool non_blocking) {
  if (!to.numel()) return to;
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  at::AutoDispatchBelowADInplaceOrView no_autograd;
  bool stays = is_there(to) && is_there(from);
  if (stays) {
    bool is_peer = to.device() != from.device();
    log("kernel", is_peer ? "peer copy" : "aten::copy_", to.device().index(), "", std::to_string(to.numel()));
  } else if (transfer(to, from, non_blocking)) {
    return to;
  }
  if (is_there(to)) about_to_write(to);
  Tensor host_to = is_there(to) ? host_view(to) : to;
  Tensor host_from = is_there(from) ? host_view(from) : from;
  host_to.copy_(host_from);
  if (is_capturing) {
    static auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::copy_", "");
    record_kernel(op, {host_to, host_from, false}, {});
  }
  return to;
}

const Tensor& resize_(const Tensor& tensor, at::IntArrayRef size, std::optional<at::MemoryFormat>) {
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  size_t needed = (tensor.storage_offset() + tensor.numel()) * tensor.itemsize();
  c10::Storage storage = tensor.storage();
  if (needed > storage.nbytes()) {
    c10::DeviceGuard on(tensor.device());
    auto memory = device_allocator.allocate(needed);
    if (storage.nbytes()) memcpy(memory.get(), storage.data(), storage.nbytes());
    storage.set_data_ptr_noswap(std::move(memory));
    storage.set_nbytes(needed);
  }
  return tensor;
}

Tensor& set_storage_offset_(Tensor& tensor, at::Storage storage, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(offset);
  if (stride.size() == size.size()) impl->set_sizes_and_strides(size, stride);
  else impl->set_sizes_contiguous(size);
  return tensor;
}
Tensor& set_storage_(Tensor& tensor, at::Storage storage) {
  int64_t size = storage.nbytes() / tensor.itemsize();
  return set_storage_offset_(tensor, std::move(storage), 0, {size}, {});
}
Tensor& set_tensor_(Tensor& tensor, const Tensor& source) {
  return set_storage_offset_(tensor, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}
Tensor zeros_without_memory(at::IntArrayRef size, MaybeDtype dtype, MaybeLayout, MaybeDevice device, std::optional<bool>) {
  at::native::ZeroTensorAllocator nothing(Device(CUDA, index_of(device.value_or(CUDA))));
  c10::DispatchKeySet keys{c10::DispatchKey::CUDA, c10::DispatchKey::ZeroTensor};
  return at::detail::empty_generic(size, &nothing, keys, c10::dtype_or_default(dtype), std::nullopt);
}
void record_stream(Tensor&, c10::Stream) {}
bool has_no_ctc_loss(const Tensor&, const Tensor&, at::IntArrayRef, at::IntArrayRef, int64_t) { return false; }
bool has_no_ctc_loss_of_tensors(const Tensor&, const Tensor&, const Tensor&, const Tensor&, int64_t) { return false; }
int64_t attention_by_plain_ops(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool, std::optional<double>, bool) { return 0; }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("copy_", &copy_);
  m.impl("resize_", &resize_);
  m.impl("set_.source_Storage_storage_offset", &set_storage_offset_);
  m.impl("set_.source_Storage", &set_storage_);
  m.impl("set_.source_Tensor", &set_tensor_);
  m.impl("record_stream", &record_stream);
  m.impl("_efficientzerotensor", &zeros_without_memory);
  for (std::string library : {"cudnn", "miopen"}) {
    m.impl(("_use_" + library + "_ctc_loss").c_str(), &has_no_ctc_loss);
    m.impl(("_use_" + library + "_ctc_loss.Tensor").c_str(), &has_no_ctc_loss_of_tensors);
  }
  m.impl("_fused_sdp_choice", &attention_by_plain_ops);
}

// ---- cells of recurrent layers: kernels of CUDA alone, on the CPU's tensors; `any_kernel` finds them there ---------------
using MaybeTensor = std::optional<Tensor>;

Tensor plus_bias(const Tensor& gates, const MaybeTensor& bias) { return bias && bias->defined() ? gates + *bias : gates; }
Tensor or_zeros(const MaybeTensor& grad, const Tensor& like) { return grad && grad->defined() ? *grad : at::zeros_like(like); }
Tensor through_sigmoid(const Tensor& grad, const Tensor& output) { return grad * output * (1 - output); }
Tensor through_tanh(const Tensor& grad, const Tensor& output) { return grad * (1 - output * output); }

std::tuple<Tensor, Tensor, Tensor> lstm_cell(const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& cell, const MaybeTensor& input_bias, const MaybeTensor& hidden_bias) {
  auto gates = (plus_bias(input_gates, input_bias) + plus_bias(hidden_gates, hidden_bias)).chunk(4, 1);
  auto in = gates[0].sigmoid(), forget = gates[1].sigmoid(), candidate = gates[2].tanh(), out = gates[3].sigmoid();
  auto next = forget * cell + in * candidate;
  return {out * next.tanh(), next, at::cat({in, forget, candidate, out}, 1)};
}
std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(const MaybeTensor& grad_hidden, const MaybeTensor& grad_cell, const Tensor& cell, const Tensor& next, const Tensor& workspace, bool has_bias) {
  auto gates = workspace.chunk(4, 1);
  auto in = gates[0], forget = gates[1], candidate = gates[2], out = gates[3];
  auto grad_out = or_zeros(grad_hidden, next), squashed = next.tanh();
  auto grad_next = or_zeros(grad_cell, next) + through_tanh(grad_out * out, squashed);
  auto grad_gates = at::cat({through_sigmoid(grad_next * candidate, in), through_sigmoid(grad_next * cell, forget),
                             through_tanh(grad_next * in, candidate), through_sigmoid(grad_out * squashed, out)}, 1);
  return {grad_gates, grad_next * forget, has_bias ? grad_gates.sum(0) : Tensor()};
}

std::tuple<Tensor, Tensor> gru_cell(const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& hidden, const MaybeTensor& input_bias, const MaybeTensor& hidden_bias) {
  auto from_input = plus_bias(input_gates, input_bias).chunk(3, 1), from_hidden = plus_bias(hidden_gates, hidden_bias).chunk(3, 1);
  auto reset = (from_input[0] + from_hidden[0]).sigmoid(), update = (from_input[1] + from_hidden[1]).sigmoid();
  auto candidate = (from_input[2] + reset * from_hidden[2]).tanh();
  return {candidate + update * (hidden - candidate), at::cat({reset, update, candidate, hidden, from_hidden[2]}, 1)};
}
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_cell_backward(const Tensor& grad, const Tensor& workspace, bool has_bias) {
  auto parts = workspace.chunk(5, 1);
  auto reset = parts[0], update = parts[1], candidate = parts[2], hidden = parts[3], from_hidden = parts[4];
  auto grad_candidate = through_tanh(grad * (1 - update), candidate);
  auto grad_reset = through_sigmoid(grad_candidate * from_hidden, reset);
  auto grad_update = through_sigmoid(grad * (hidden - candidate), update);
  auto grad_input = at::cat({grad_reset, grad_update, grad_candidate}, 1);
  auto grad_hidden = at::cat({grad_reset, grad_update, grad_candidate * reset}, 1);
  return {grad_input, grad_hidden, grad * update, has_bias ? grad_input.sum(0) : Tensor(), has_bias ? grad_hidden.sum(0) : Tensor()};
}

TORCH_LIBRARY_IMPL(aten, CPU, m) {
  m.impl("_thnn_fused_lstm_cell", &lstm_cell);
  m.impl("_thnn_fused_lstm_cell_backward_impl", &lstm_cell_backward);
  m.impl("_thnn_fused_gru_cell", &gru_cell);
  m.impl("_thnn_fused_gru_cell_backward", &gru_cell_backward);
}

// ---- setting up ------------------------------------------------------------------------------------------------------------
void register_kernels() {
  static std::deque<torch::Library> kept;
  auto& library = kept.emplace_back(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (!starts_with(name.name, "aten::")) continue;
    auto op = dispatcher.findOp(name);
    if (!op || op->hasKernelForDispatchKey(c10::DispatchKey::CUDA) || ON_THE_CPU_ALONE.count(name.name)) continue;
    std::string full = name.name + (name.overload_name.empty() ? "" : "." + name.overload_name);
    // For lists of tensors CUDA has kernels where the CPU goes from tensor to tensor.
    bool is_foreach = starts_with(name.name, "aten::_foreach_") && op->schema().overload_name().find("out") == std::string::npos;
    // What the CPU makes a convolution of may be no op, or one that a CUDA tensor does not get to.
    bool is_whole = full == "aten::convolution" || full == "aten::convolution_backward";
    if (!is_foreach && !is_whole && !op->hasKernelForDispatchKey(c10::DispatchKey::CPU)) continue;
    library.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&any_kernel>());
  }
}

}  // namespace

// ---- for Python, by ctypes: an op would be counted as one of the program's ------------------------------------------------
extern "C" {

void set_up() {
  static c10::impl::DeviceGuardImplRegistrar registrar(CUDA, &guard);
  c10::SetAllocator(CUDA, &device_allocator);
  // torch has asked for its hooks when it was imported: the object that it made gets our methods. It has no members.
  static_assert(sizeof(Hooks) == sizeof(at::CUDAHooksInterface));
  new (const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks())) Hooks();
  register_kernels();
}

void start_log() { Lock lock(mutex); log_lines.clear(); is_logging = true; }
const char* stop_log() {
  Lock lock(mutex);
  is_logging = false;
  static std::string text;
  text.clear();
  for (const auto& line : log_lines) text += line + "\n";
  return text.c_str();
}
void mark(const char* name) { log("mark", name, -1); }

int get_device() { return device_now; }
void set_device(int device) { device_now = device; }
int64_t get_stream(int device) { return streams_now[device]; }
void set_stream(int device, int64_t stream) { streams_now[device] = stream; }
void synchronize(int device) { guard.synchronizeDevice(device); }

int64_t get_bytes_held() { return bytes_held; }
int64_t get_bytes_peak() { return bytes_peak; }
void reset_bytes_peak() { Lock lock(mutex); bytes_peak = bytes_held; }
void set_late_queries(int count) { late_queries = count; }
void set_sync_debug_mode(int mode) { sync_debug_mode = mode; }
int get_sync_debug_mode() { return sync_debug_mode; }

bool capturing() { return is_capturing; }
int begin_capture() {
  Lock lock(mutex);
  graphs.emplace_back();
  is_capturing = true;
  return graphs.size() - 1;
}
void end_capture() {
  Lock lock(mutex);
  is_capturing = false;
  for (auto& [address, kept] : before_capture) memcpy(const_cast<void*>(address), kept.second.data(), kept.second.size());
  before_capture.clear();
}
void replay(int graph) {
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  at::AutoDispatchBelowADInplaceOrView no_autograd;
  for (auto& kernel : graphs.at(graph)) {
    Stack stack = kernel.arguments;
    c10::Dispatcher::singleton().redispatchBoxed(kernel.op, c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
    size_t next = 0;
    auto put = [&](const Tensor& result) {
      if (result.defined() && next < kernel.results.size()) kernel.results[next++].copy_(result);
      return result;
    };
    if (!kernel.results.empty()) for (const IValue& value : stack) map_tensors(value, put);
  }
}

}  // extern "C"
