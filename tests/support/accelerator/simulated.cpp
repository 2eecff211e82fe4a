// A device whose bytes lie in the host's memory and whose time is the host's: streams are queues with an end, events are marks.
// Arithmetic is done by the CPU kernels at once; what the device would have taken for it is what `work` says.
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/version.h>
#include <unistd.h>

#include <chrono>
#include <map>
#include <mutex>
#include <thread>

namespace {
using namespace at;
constexpr auto kSim = kPrivateUse1;
constexpr DispatchKeySet kKeys(DispatchKey::PrivateUse1);
constexpr int kMostDevices = 8;

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }
void sleep_until(double at) { std::this_thread::sleep_for(std::chrono::duration<double>(std::max(0.0, at - now()))); }

struct Span { double begin, end; };
struct Block { char* data; size_t size; DeviceIndex device; StreamId stream; double written = 0, read = 0; };
struct Memory { size_t allocated = 0, peak = 0, reserved = 0; };
struct Simulation {
  std::mutex mutex;
  double bytes_per_s = 12e9, pageable_slower = 2, pinning_s = 0;
  size_t total = size_t(8) << 30;
  int devices = 1;
  pid_t user = 0;  // the process that uses the device
  bool has_failed = false;
  StreamId last_stream = 0;
  std::map<std::pair<DeviceIndex, StreamId>, double> ends;
  std::map<std::tuple<DeviceIndex, StreamId, size_t>, std::vector<Block*>> freed;
  std::map<const char*, size_t> pinned;
  std::multimap<size_t, char*> unpinned;  // free, and kept for the next of its size
  Memory memory[kMostDevices];
  std::vector<std::string> hazards;
};
Simulation& sim = *new Simulation;  // tensors may outlive it
thread_local DeviceIndex current_device = 0;
thread_local StreamId current_stream[kMostDevices] = {};
thread_local bool in_kernel = false;  // the copies of the CPU fallback are none of the device's
using Lock = std::lock_guard<std::mutex>;
DeviceIndex index_of(Device device) { return device.has_index() ? device.index() : current_device; }

void use() {  // what every call of the device begins with
  TORCH_CHECK(!sim.user || sim.user == getpid(), "Cannot re-initialize CUDA in forked subprocess (of the simulated device). ",
              "To use CUDA with multiprocessing, you must use the 'spawn' start method");
  sim.user = getpid();
  if (!sim.has_failed) return;
  std::string text = "CUDA error: device-side assert triggered (on the simulated device)";
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 8
  throw c10::AcceleratorError({__func__, __FILE__, __LINE__}, 710, text);
#else
  TORCH_CHECK(false, text);
#endif
}

Span launched(DeviceIndex device, double seconds) {  // behind what the current stream has
  double& end = sim.ends[{device, current_stream[device]}];
  double begin = std::max(end, now());
  return {begin, end = begin + seconds};
}

// What begins to read or write a tensor: a hazard where the bytes are not written yet, or are still in use.
void note(const Tensor& tensor, Span span, bool writes) {
  TORCH_CHECK(tensor.is_privateuseone(), "Expected all tensors to be on the same device, but found one on ", tensor.device());
  auto* block = static_cast<Block*>(tensor.storage().data_ptr().get_context());
  if (!block) return;  // of a tensor without elements
  double ready = writes ? std::max(block->written, block->read) : block->written;
  if (span.begin < ready)
    sim.hazards.push_back(c10::str(writes ? "written while in use, " : "read before it is written, ",
                                   1e3 * (ready - span.begin), " ms early: ", block->size, " bytes"));
  double& mine = writes ? block->written : block->read;
  mine = std::max(mine, span.end);
}

void release_cached() {
  for (auto& [key, blocks] : sim.freed) {
    for (Block* block : blocks) sim.memory[block->device].reserved -= block->size, std::free(block->data), delete block;
    blocks.clear();
  }
}

void free_block(void* context) {
  Lock lock(sim.mutex);
  auto* block = static_cast<Block*>(context);
  sim.memory[block->device].allocated -= block->size;
  sim.freed[{block->device, block->stream, block->size}].push_back(block);
}

// As CUDA's: a block that is freed goes to the next allocation of its size on its stream at once, whoever still works on it.
struct CachingAllocator final : Allocator {
  DataPtr allocate(size_t bytes) override {
    use();
    Lock lock(sim.mutex);
    auto device = current_device;
    auto stream = current_stream[device];
    size_t size = (bytes + 511) / 512 * 512;
    if (!size) return {nullptr, nullptr, &free_block, Device(kSim, device)};
    auto& memory = sim.memory[device];
    auto& cached = sim.freed[{device, stream, size}];
    if (cached.empty()) {
      if (memory.reserved + size > sim.total) release_cached();
      TORCH_CHECK_WITH(OutOfMemoryError, memory.reserved + size <= sim.total, "CUDA out of memory. Tried to allocate ", size,
                       " bytes on sim:", int(device), " of ", sim.total, ", of which ", memory.allocated, " are in use.");
      cached.push_back(new Block{static_cast<char*>(std::malloc(size)), size, device, stream});
      memory.reserved += size;
    }
    Block* block = cached.back();
    cached.pop_back();
    memory.allocated += size;
    memory.peak = std::max(memory.peak, memory.allocated);
    return {block->data, block, &free_block, Device(kSim, device)};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
} caching_allocator;
REGISTER_ALLOCATOR(kSim, &caching_allocator)

void unpin(void* data) {
  Lock lock(sim.mutex);
  auto found = sim.pinned.find(static_cast<char*>(data));
  sim.unpinned.emplace(found->second, static_cast<char*>(data));
  sim.pinned.erase(found);
}

struct PinnedAllocator final : Allocator {
  DataPtr allocate(size_t bytes) override {
    use();
    Lock lock(sim.mutex);
    char* data;
    if (auto kept = sim.unpinned.find(bytes); kept != sim.unpinned.end()) {
      data = kept->second;
      sim.unpinned.erase(kept);
    } else {
      data = static_cast<char*>(std::malloc(std::max(bytes, size_t(1))));
      sleep_until(now() + sim.pinning_s);
    }
    sim.pinned[data] = bytes;
    return {data, data, &unpin, Device(kCPU)};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
} pinned_allocator;

struct Hooks final : PrivateUse1HooksInterface {
  bool isBuilt() const { return true; }  // these two without `override`: torch 2.6 does not ask for them
  bool isAvailable() const { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return sim.user; }
  Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  bool isPinnedPtr(const void* data) const override {
    Lock lock(sim.mutex);
    auto after = sim.pinned.upper_bound(static_cast<const char*>(data));
    if (after == sim.pinned.begin()) return false;
    auto [begin, bytes] = *std::prev(after);
    return data < begin + bytes;
  }
} hooks;

struct Mark { double at; };
struct Guard final : c10::impl::DeviceGuardImplInterface {
  static Stream of(Device device, StreamId id) { return Stream(Stream::UNSAFE, Device(kSim, index_of(device)), id); }
  static double end(const Stream& stream) {
    use();
    Lock lock(sim.mutex);
    return sim.ends[{stream.device_index(), stream.id()}];
  }
  DeviceType type() const override { return kSim; }
  Device getDevice() const override { return Device(kSim, current_device); }
  void uncheckedSetDevice(Device device) const noexcept override { current_device = index_of(device); }
  void setDevice(Device device) const override {
    TORCH_CHECK(index_of(device) < sim.devices, "CUDA error: invalid device ordinal (of the simulated device)");
    uncheckedSetDevice(device);
  }
  Device exchangeDevice(Device device) const override {
    Device old = getDevice();
    setDevice(device);
    return old;
  }
  DeviceIndex deviceCount() const noexcept override { return sim.devices; }
  Stream getStream(Device device) const noexcept override { return of(device, current_stream[index_of(device)]); }
  Stream getDefaultStream(Device device) const override { return of(device, 0); }
  Stream getNewStream(Device device, int) const override {
    use();
    Lock lock(sim.mutex);
    return of(device, ++sim.last_stream);
  }
  Stream exchangeStream(Stream stream) const noexcept override {
    Stream old = getStream(stream.device());
    current_stream[stream.device_index()] = stream.id();
    return old;
  }
  void record(void** event, const Stream& stream, const DeviceIndex, const EventFlag) const override {
    if (!*event) *event = new Mark;
    static_cast<Mark*>(*event)->at = std::max(end(stream), now());
  }
  void block(void* event, const Stream& stream) const override {
    use();
    Lock lock(sim.mutex);
    double& end = sim.ends[{stream.device_index(), stream.id()}];
    if (event) end = std::max(end, static_cast<Mark*>(event)->at);
  }
  bool queryEvent(void* event) const override { return use(), !event || static_cast<Mark*>(event)->at <= now(); }
  bool queryStream(const Stream& stream) const override { return end(stream) <= now(); }
  void synchronizeStream(const Stream& stream) const override { sleep_until(end(stream)); }
  void synchronizeEvent(void* event) const override { use(), sleep_until(event ? static_cast<Mark*>(event)->at : 0); }
  void synchronizeDevice(const DeviceIndex device) const override {
    double last = 0;
    for (StreamId id = 0; id <= sim.last_stream; ++id) last = std::max(last, end(of(Device(kSim, device), id)));
    sleep_until(last);
  }
  double elapsedTime(void* from, void* to, const DeviceIndex) const override {
    TORCH_CHECK(queryEvent(from) && queryEvent(to), "CUDA error: device not ready (the simulated device)");
    return 1e3 * (static_cast<Mark*>(to)->at - static_cast<Mark*>(from)->at);
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<Mark*>(event); }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

Tensor on_host(const Tensor& tensor) {  // the same bytes
  if (tensor.is_cpu()) return tensor;
  return from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), tensor.options().device(kCPU));
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  use();
  on_host(to).copy_(on_host(from));
  if (in_kernel) return to;
  bool crosses = from.is_cpu() || to.is_cpu();
  bool pinned = crosses && hooks.isPinnedPtr((from.is_cpu() ? from : to).storage().data());
  Span span;
  {
    Lock lock(sim.mutex);
    double seconds = crosses ? from.nbytes() / sim.bytes_per_s * (pinned ? 1 : sim.pageable_slower) : 0;
    span = launched((from.is_cpu() ? to : from).device().index(), seconds);
    if (!from.is_cpu()) note(from, span, false);
    if (!to.is_cpu()) note(to, span, true);
  }
  if (crosses && !(pinned && non_blocking)) sleep_until(span.end);
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  native::resize_(to, from.sizes());
  return copy_from(from, to, false);
}

Scalar item(const Tensor& tensor) {
  return native::_local_scalar_dense_cpu(tensor.to(kCPU));  // a copy that is waited for
}

Tensor empty(IntArrayRef size, std::optional<ScalarType> dtype, std::optional<Layout>, std::optional<Device> device,
             std::optional<bool>, std::optional<MemoryFormat> format) {
  DeviceGuard guard(*device);
  return at::detail::empty_generic(size, &caching_allocator, kKeys, dtype_or_default(dtype), format);
}

Tensor empty_strided(IntArrayRef size, IntArrayRef stride, std::optional<ScalarType> dtype, std::optional<Layout>,
                     std::optional<Device> device, std::optional<bool>) {
  DeviceGuard guard(*device);
  return at::detail::empty_strided_generic(size, stride, &caching_allocator, kKeys, dtype_or_default(dtype));
}

std::vector<Tensor> ours(const torch::jit::Stack& stack, size_t count) {  // of the arguments or results on top of the stack
  std::vector<Tensor> found;
  auto add = [&](const IValue& value) {  // one that is not defined is on no device
    if (value.isTensor() && value.toTensor().is_privateuseone()) found.push_back(value.toTensor());
  };
  for (auto value = stack.end() - count; value != stack.end(); ++value) {
    if (!value->isList()) add(*value);
    else for (const IValue& each : value->toListRef()) add(each);
  }
  return found;
}

void work(double seconds, TensorList reads) {
  use();
  Lock lock(sim.mutex);
  Span span = launched(reads.empty() ? current_device : reads[0].device().index(), seconds);
  for (const Tensor& tensor : reads) note(tensor, span, false);
}

void kernel(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  auto reads = ours(*stack, op.schema().arguments().size());
  work(0, reads);
  {
    DeviceGuard guard(Device(kSim, reads.empty() ? current_device : reads[0].device().index()));
    struct Inside { Inside() { in_kernel = true; } ~Inside() { in_kernel = false; } } inside;
    native::cpu_fallback(op, stack);
  }
  Lock lock(sim.mutex);
  for (const Tensor& tensor : ours(*stack, op.schema().returns().size()))
    note(tensor, launched(tensor.device().index(), 0), true);
}
}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&kernel>()); }

// Autocast may be asked for, and changes nothing.
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &item);
  m.impl("as_strided", &native::as_strided_tensorimpl);
  m.impl("view", &native::view);
  m.impl("_reshape_alias", &native::_reshape_alias);
  m.impl("resize_", &native::resize_);
  m.impl("set_.source_Storage", [](Tensor& self, Storage source) -> Tensor& { return native::set_(self, source); });
  m.impl("set_.source_Storage_storage_offset", &native::set_storage_cpu_);
  m.impl("set_.source_Tensor", &native::set_tensor_);
  // Torch has a way of its own to convolve on devices that are not its own, and no kernel for it.
  m.impl("convolution", torch::CppFunction::makeFromBoxedFunction<&kernel>());
  m.impl("convolution_backward", torch::CppFunction::makeFromBoxedFunction<&kernel>());
}

TORCH_LIBRARY(sim, m) {
  m.def("work(float seconds, Tensor[] reads) -> ()", &work);
  m.def("use", &use);
  m.def("is_used", [] { return sim.user == getpid(); });
  m.def("is_in_bad_fork", [] { return sim.user && sim.user != getpid(); });
  m.def("fail", [] { sim.has_failed = true; });
  m.def("synchronize", [](int64_t device) { Guard().synchronizeDevice(device); });
  m.def("memory", [](int64_t device) {
    Lock lock(sim.mutex);
    auto& memory = sim.memory[device];
    return std::vector<int64_t>{int64_t(memory.allocated), int64_t(memory.peak), int64_t(memory.reserved), int64_t(sim.total)};
  });
  m.def("reset_peak", [](int64_t device) { sim.memory[device].peak = sim.memory[device].allocated; });
  m.def("empty_cache", [] { Lock lock(sim.mutex); release_cached(); });
  m.def("hazards", [] { Lock lock(sim.mutex); return sim.hazards; });
  m.def("configure", [](double bytes_per_s, double pageable_slower, int64_t memory_bytes, int64_t devices, double pinning_s) {
    TORCH_CHECK(devices <= kMostDevices, "devices=", devices, " is more than ", kMostDevices);
    sim.bytes_per_s = bytes_per_s, sim.pageable_slower = pageable_slower, sim.total = memory_bytes, sim.devices = devices;
    sim.pinning_s = pinning_s;
  });
  RegisterPrivateUse1HooksInterface(&hooks);
}
