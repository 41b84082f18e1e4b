// A GPU as device.h has it.
//
// Every queue is a stream that does not synchronise with the legacy default stream.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

#include "device/cuda_context.h"
#include "device/device.h"
#include "device/launch_tables.h"
#include "device/scratch.h"
#include "kernels/batch_cuda.h"

namespace psstore::device {
namespace {

// Throws Error(DEVICE_FAILED) that names the device, the call and CUDA's reason.
void require(cudaError_t status, const std::string& device, const char* call) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // clears it, if it can be cleared: the next launch would report it as its own
  throw Error(ErrorCode::DEVICE_FAILED, "device " + device + " failed: " + call + ": " +
                                            cudaGetErrorString(status) + " (" +
                                            cudaGetErrorName(status) + ")");
}

class CudaDevice final : public Device, public std::enable_shared_from_this<CudaDevice> {
 public:
  CudaDevice(std::string name, int index) : name_(std::move(name)), index_(index) {}

  const std::string& name() const override { return name_; }
  MemoryInfo memory() const override {
    const Entered here = enter();
    MemoryInfo info;
    require(cudaMemGetInfo(&info.free_bytes, &info.total_bytes), name_, "cudaMemGetInfo");
    return info;
  }
  std::byte* allocate(size_t num_bytes) override {
    const Entered here = enter();
    const auto on_device = [](void** block, size_t size) { return cudaMalloc(block, size); };
    return block_of(on_device, "cudaMalloc", num_bytes);
  }
  void free(std::byte* memory) noexcept override {
    if (memory != nullptr) leave([&] { cudaFree(memory); });
  }
  std::byte* allocate_pinned(size_t num_bytes) override {
    const Entered here = enter();
    const auto pinned = [](void** block, size_t size) {
      return cudaHostAlloc(block, size, cudaHostAllocPortable);  // for the copies of all devices
    };
    return block_of(pinned, "cudaHostAlloc", num_bytes);
  }
  void free_pinned(std::byte* memory) noexcept override {
    if (memory != nullptr) leave([&] { cudaFreeHost(memory); });
  }

  std::string identity() const override { return identity_; }
  std::string export_block(const std::byte* block) override {
    const Entered here = enter();
    cudaIpcMemHandle_t handle;
    auto* const memory =
        const_cast<std::byte*>(block);  // it asks for one to write to, and does not
    permit(cudaIpcGetMemHandle(&handle, memory), "cudaIpcGetMemHandle");
    return {reinterpret_cast<const char*>(&handle), sizeof(handle)};
  }
  std::byte* import_block(const std::string& handle) override {
    cudaIpcMemHandle_t of_cuda;
    if (handle.size() != sizeof(of_cuda)) {
      throw Error(ErrorCode::BAD_ARGUMENT, "a block's handle has " + std::to_string(handle.size()) +
                                               " bytes, one of CUDA's has " +
                                               std::to_string(sizeof(of_cuda)));
    }
    std::memcpy(&of_cuda, handle.data(), sizeof(of_cuda));
    const Entered here = enter();
    void* block = nullptr;
    permit(cudaIpcOpenMemHandle(&block, of_cuda, cudaIpcMemLazyEnablePeerAccess),
           "cudaIpcOpenMemHandle");
    return static_cast<std::byte*>(block);
  }
  void end_import(std::byte* block) noexcept override {
    leave([&] { cudaIpcCloseMemHandle(block); });
  }

  std::unique_ptr<Queue> make_queue() override;
  std::unique_ptr<Queue> borrow_queue(uint64_t stream) override;

  // Makes it the calling thread's device: streams and memory are those of the current one. Until the end of
  // the scope, as the thread may be a program's that has chosen another, or none yet.
  class Entered {
   public:
    explicit Entered(const CudaDevice& device) {
      const CUcontext context = device.context_.get();
      if (current_context() != context) context_.emplace(context);
    }
    Entered(const Entered&) = delete;
    Entered& operator=(const Entered&) = delete;

   private:
    std::optional<PushedContext> context_;
  };
  [[nodiscard]] Entered enter() const { return Entered(*this); }
  // Gives something back where it was made. A call from a thread without a context would make one, and of
  // device 0 whichever this is.
  template <class GiveBack>
  void leave(GiveBack give_back) const noexcept {
    try {
      const Entered here = enter();
      give_back();
    } catch (const Error&) {  // the device failed, and has nothing of ours any more
    }
  }

 private:
  template <class Allocate>
  std::byte* block_of(Allocate allocate, const char* call, size_t num_bytes) {
    void* block = nullptr;
    const cudaError_t status = allocate(&block, std::max<size_t>(num_bytes, 1));
    if (status == cudaErrorMemoryAllocation) {
      cudaGetLastError();  // clears it: later calls would report it as theirs
      return nullptr;
    }
    require(status, name_, call);
    return static_cast<std::byte*>(block);
  }

  // What a system may refuse, in a container or under WSL: no failure of the device.
  void permit(cudaError_t status, const char* call) const {
    if (status == cudaSuccess) return;
    cudaGetLastError();  // clears it
    throw Error(ErrorCode::BAD_ARGUMENT, "device " + name_ + " shares no memory: " + call + ": " +
                                             cudaGetErrorString(status));
  }

  // Its UUID: numbers differ between processes that see other devices. A part of a GPU (MIG) may say the same
  // as another one; then it is the import that fails.
  std::string find_identity() const {
    cudaDeviceProp properties;
    require(cudaGetDeviceProperties(&properties, index_), name_, "cudaGetDeviceProperties");
    return {properties.uuid.bytes, sizeof(properties.uuid.bytes)};
  }

  const std::string name_;
  const int index_;
  mutable PrimaryContext context_{index_};
  const std::string identity_ = find_identity();  // once: it takes milliseconds
};

class CudaFence final : public Fence {
 public:
  explicit CudaFence(std::shared_ptr<CudaDevice> device) : device_(std::move(device)) {
    require(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), device_->name(),
            "cudaEventCreate");
  }
  ~CudaFence() override {
    device_->leave([&] { cudaEventDestroy(event_); });
  }
  CudaFence(const CudaFence&) = delete;
  CudaFence& operator=(const CudaFence&) = delete;

  bool done() override {
    const CudaDevice::Entered here = device_->enter();
    const cudaError_t status = cudaEventQuery(event_);
    if (status == cudaErrorNotReady) {
      cudaGetLastError();  // an answer, not an error
      return false;
    }
    require(status, device_->name(), "work on it");
    return true;
  }
  void wait() override {
    const CudaDevice::Entered here = device_->enter();
    require(cudaEventSynchronize(event_), device_->name(), "work on it");
  }
  cudaEvent_t event() const { return event_; }

 private:
  const std::shared_ptr<CudaDevice> device_;
  cudaEvent_t event_ = nullptr;
};

constexpr size_t kSmallestTableBytes = 64 << 10;  // of some hundred slices

class CudaQueue final : public Queue {
 public:
  CudaQueue(std::shared_ptr<CudaDevice> device, cudaStream_t borrowed)
      : device_(std::move(device)), stream_(borrowed), borrowed_(true) {}
  explicit CudaQueue(std::shared_ptr<CudaDevice> device)
      : device_(std::move(device)), borrowed_(false) {
    const CudaDevice::Entered here = device_->enter();
    require(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), device_->name(),
            "cudaStreamCreate");
  }
  ~CudaQueue() override {
    if (borrowed_ && tables_.empty() && scratch_.empty() && encoding_.empty()) return;
    device_->leave([&] {
      cudaStreamSynchronize(stream_);  // a failure was reported where somebody asked
      if (!borrowed_) cudaStreamDestroy(stream_);
    });
  }
  CudaQueue(const CudaQueue&) = delete;
  CudaQueue& operator=(const CudaQueue&) = delete;

  FenceRef record() override {
    const CudaDevice::Entered here = device_->enter();
    auto fence = std::make_shared<CudaFence>(device_);
    check(cudaEventRecord(fence->event(), stream_), "cudaEventRecord");
    return fence;
  }
  void wait_for(const FenceRef& fence) override {
    const CudaDevice::Entered here =
        device_->enter();  // the default stream is the current device's
    const auto& of_cuda = static_cast<const CudaFence&>(*fence);
    check(cudaStreamWaitEvent(stream_, of_cuda.event(), 0), "cudaStreamWaitEvent");
  }

  void copy_in(void* to, const void* from_host, size_t num_bytes) override {
    transfer(to, from_host, num_bytes, cudaMemcpyHostToDevice);
  }
  void copy_out(void* to_host, const void* from, size_t num_bytes) override {
    transfer(to_host, from, num_bytes, cudaMemcpyDeviceToHost);
  }
  // By unified addressing also from another device.
  void copy(void* to, const void* from, size_t num_bytes) override {
    transfer(to, from, num_bytes, cudaMemcpyDefault);
  }
  void copy_pieces(std::span<const CopyPiece> pieces) override {
    if (pieces.empty()) return;
    if (pieces.size() == 1) return copy(pieces[0].to, pieces[0].from, pieces[0].num_bytes);
    const CudaDevice::Entered here = device_->enter();
    launch([&](LaunchMemorySource& memory) { cuda_copy_pieces_async(pieces, memory, stream_); });
  }
  void zero(void* to, size_t num_bytes) override {
    if (num_bytes == 0) return;
    const CudaDevice::Entered here = device_->enter();
    check(cudaMemsetAsync(to, 0, num_bytes, stream_), "cudaMemsetAsync");
  }

  void reduce_update(std::span<const SliceUpdate> updates) override {
    if (updates.empty()) return;
    const CudaDevice::Entered here = device_->enter();
    launch([&](LaunchMemorySource& memory) { cuda_reduce_update_async(updates, memory, stream_); });
  }
  void reduced_squares(std::span<const SliceUpdate> updates, double* sums) override {
    if (updates.empty()) return;
    const CudaDevice::Entered here = device_->enter();
    launch([&](LaunchMemorySource& memory) {
      cuda_reduced_squares_async(updates, sums, memory, stream_);
    });
  }
  void convert(DType from, DType to, const void* source, void* destination,
               int64_t num_elems) override {
    const CudaDevice::Entered here = device_->enter();
    cuda_convert_async(from, to, source, destination, num_elems, stream_);
  }
  void encode(std::span<const ToEncode> slices) override {
    if (slices.empty()) return;
    const CudaDevice::Entered here = device_->enter();
    const size_t num_bytes = cuda_encode_scratch_bytes(slices);
    std::byte* const memory = num_bytes > 0 ? encoding_.of(*this, num_bytes) : nullptr;
    if (num_bytes > 0 && memory == nullptr) {
      throw Error(ErrorCode::OUT_OF_MEMORY, "device " + device_->name() + " has no " +
                                                std::to_string(num_bytes) +
                                                " bytes left to encode with");
    }
    launch([&](LaunchMemorySource& source) { cuda_encode_async(slices, memory, source, stream_); });
  }
  void encode_changes(std::span<const ToEncode> slices) override {
    if (slices.empty()) return;
    const CudaDevice::Entered here = device_->enter();
    launch([&](LaunchMemorySource& source) { cuda_encode_changes_async(slices, source, stream_); });
  }
  void decode(const Encoded& encoded, void* destination) override {
    const CudaDevice::Entered here = device_->enter();
    cuda_decode_async(encoded, destination, stream_);
  }
  std::byte* scratch(size_t num_bytes) override { return scratch_.of(*this, num_bytes); }
  uint64_t stream() const override { return reinterpret_cast<uint64_t>(stream_); }

 private:
  void check(cudaError_t status, const char* call) { require(status, device_->name(), call); }
  void transfer(void* to, const void* from, size_t num_bytes, cudaMemcpyKind kind) {
    if (num_bytes == 0) return;
    const CudaDevice::Entered here = device_->enter();
    check(cudaMemcpyAsync(to, from, num_bytes, kind, stream_), "cudaMemcpyAsync");
  }

  // `queue_launches` gets memory for its tables, and puts what reads them into the stream.
  template <class QueueLaunches>
  void launch(QueueLaunches queue_launches) {
    queue_launches(tables_);
    tables_.used_until(record());
  }

  const std::shared_ptr<CudaDevice> device_;
  cudaStream_t stream_ = nullptr;
  const bool borrowed_;
  LaunchTables tables_{*device_, kSmallestTableBytes};
  Scratch scratch_{*device_};
  Scratch encoding_{*device_};  // of topk: what is encoded may lie in the other one
};

std::unique_ptr<Queue> CudaDevice::make_queue() {
  return std::make_unique<CudaQueue>(shared_from_this());
}

// 1 and 2, which stand for the default streams, are handles as others are.
std::unique_ptr<Queue> CudaDevice::borrow_queue(uint64_t stream) {
  return std::make_unique<CudaQueue>(shared_from_this(), reinterpret_cast<cudaStream_t>(stream));
}

}  // namespace

int cuda_device_of(const void* memory) {
  cudaPointerAttributes found{};
  const cudaError_t status = cudaPointerGetAttributes(&found, memory);
  if (status != cudaSuccess) cudaGetLastError();
  if (status != cudaSuccess ||
      (found.type != cudaMemoryTypeDevice && found.type != cudaMemoryTypeManaged)) {
    throw Error(ErrorCode::BAD_ARGUMENT, "an array says that it is of a CUDA device, and is not");
  }
  return found.device;
}

std::shared_ptr<Device> open_cuda_device(const std::string& name, int index) {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status != cudaSuccess) {
    cudaGetLastError();
    throw Error(ErrorCode::BAD_ARGUMENT,
                "device '" + name + "': no CUDA device can be used here: " +
                    cudaGetErrorString(status) + "; check nvidia-smi and the driver's version");
  }
  if (index >= count) {
    throw Error(ErrorCode::BAD_ARGUMENT, "device '" + name + "': there are " +
                                             std::to_string(count) +
                                             " CUDA devices, the first is cuda:0");
  }
  auto device = std::make_shared<CudaDevice>(name, index);
  device->memory();  // makes the context: what fails does so now
  return device;
}

}  // namespace psstore::device
