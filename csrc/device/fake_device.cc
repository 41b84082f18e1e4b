#include "device/fake_device.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <new>
#include <optional>
#include <random>
#include <sstream>
#include <utility>
#include <vector>

#include "core/holes.h"
#include "device/launch_tables.h"
#include "device/scratch.h"

namespace psstore::device {
namespace {

constexpr int kPoison = 0xFF;  // as float32, float64, float16 or bfloat16: a NaN
constexpr int kMostPolls = 8;  // of a fence that was not done, until it is
constexpr size_t kTableBytesPerSlice = kBufferAlignment;  // of a launch
constexpr std::align_val_t kPinnedAlignment{kBufferAlignment};

// One lock for all fake devices: a queue may wait for a fence of another device. Recursive, since work on one
// then has work done on the other.
std::recursive_mutex& world() {
  static std::recursive_mutex mutex;
  return mutex;
}
using Locked = std::lock_guard<std::recursive_mutex>;

// A file in memory, of zeros that have none yet. Throws std::bad_alloc.
class MemoryFile {
 public:
  explicit MemoryFile(size_t num_bytes)
      : fd_(memfd_create("psstore-fake-device", MFD_CLOEXEC)), num_bytes_(num_bytes) {
    if (fd_ >= 0 && ftruncate(fd_, static_cast<off_t>(num_bytes)) == 0) return;
    if (fd_ >= 0) close(fd_);
    throw std::bad_alloc();
  }
  ~MemoryFile() { close(fd_); }
  MemoryFile(const MemoryFile&) = delete;
  MemoryFile& operator=(const MemoryFile&) = delete;

  int fd() const { return fd_; }
  size_t num_bytes() const { return num_bytes_; }
  // How another process finds it while this one lives.
  std::string path() const {
    return "/proc/" + std::to_string(getpid()) + "/fd/" + std::to_string(fd_);
  }

 private:
  const int fd_;
  const size_t num_bytes_;
};

// A mapping of such a file that can be touched only while an Access is there.
class Region {
 public:
  // Throws std::bad_alloc.
  Region(int fd, size_t num_bytes) : num_bytes_(num_bytes) {
    void* const mapped = mmap(nullptr, num_bytes, PROT_NONE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    if (mapped == MAP_FAILED) throw std::bad_alloc();
    base_ = static_cast<std::byte*>(mapped);
    all().push_back(this);
  }
  ~Region() {
    std::erase(all(), this);
    munmap(base_, num_bytes_);
  }
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  std::byte* base() const { return base_; }
  size_t num_bytes() const { return num_bytes_; }

 private:
  friend class Access;
  // Of all fake devices: copies go from one to the other.
  static std::vector<Region*>& all() {
    static std::vector<Region*> regions;
    return regions;
  }

  std::byte* base_;
  const size_t num_bytes_;
};

// A device's memory.
class Arena {
 public:
  explicit Arena(size_t num_bytes) : file_(num_bytes), region_(file_.fd(), num_bytes) {
    free_.give_back(0, num_bytes);
  }

  // First fit.
  std::byte* take(size_t num_bytes) {
    const size_t size = rounded(num_bytes);
    const std::optional<uint64_t> begin = free_.take(size);
    if (!begin) return nullptr;
    taken_[*begin] = size;
    return region_.base() + *begin;
  }
  // How many bytes they were.
  size_t give_back(const std::byte* memory) {
    const auto taken = taken_.find(offset_of(memory));
    const auto [begin, size] = *taken;
    taken_.erase(taken);
    free_.give_back(begin, size);
    return size;
  }
  // Whether it begins in what was taken and goes on beyond its end.
  bool leaves_allocation(const std::byte* memory, size_t num_bytes) const {
    if (memory < region_.base() || memory >= region_.base() + region_.num_bytes()) return false;
    const size_t begin = offset_of(memory);
    const auto next = taken_.upper_bound(begin);
    if (next == taken_.begin()) return false;
    const auto [first, size] = *std::prev(next);
    return begin < first + size && begin + num_bytes > first + size;
  }
  size_t bytes_free() const { return free_.num_bytes(); }
  size_t num_bytes() const { return region_.num_bytes(); }
  size_t offset_of(const std::byte* memory) const {
    return static_cast<size_t>(memory - region_.base());
  }
  const MemoryFile& file() const { return file_; }

 private:
  static size_t rounded(size_t num_bytes) {
    return std::max(kBufferAlignment,
                    (num_bytes + kBufferAlignment - 1) / kBufferAlignment * kBufferAlignment);
  }

  const MemoryFile file_;
  const Region region_;
  Holes free_;
  std::map<size_t, size_t> taken_;  // begin -> size
};

// While it is there the memory of all fake devices can be read and written. REQUIRES: world().
class Access {
 public:
  Access() {
    if (depth()++ == 0) protect(PROT_READ | PROT_WRITE);
  }
  ~Access() {
    if (--depth() == 0) protect(PROT_NONE);
  }
  Access(const Access&) = delete;
  Access& operator=(const Access&) = delete;

 private:
  static int& depth() {
    static int value = 0;
    return value;
  }
  static void protect(int how) {
    for (const Region* region : Region::all()) mprotect(region->base_, region->num_bytes_, how);
  }
};

// An update with all that it refers to.
struct OwnedUpdate {
  SliceUpdate update;
  std::vector<Contribution> contributions;
  std::optional<Hyper> hyper;

  explicit OwnedUpdate(const SliceUpdate& given)
      : update(given), contributions(given.contributions.begin(), given.contributions.end()) {
    if (given.hyper != nullptr) hyper = *given.hyper;
  }
  SliceUpdate whole() const {
    SliceUpdate made = update;
    made.contributions = contributions;
    made.hyper = hyper ? &*hyper : nullptr;
    return made;
  }
};

class FakeDevice;
class FakeFence;

struct Item {
  std::function<void()> work;         // or
  FenceRef awaited;                   // or
  std::shared_ptr<FakeFence> passed;  // one of them
};

// The work of a queue that is not done. Shared with its fences.
struct Backlog {
  FakeDevice* device;  // alive: its queue holds it, and forces the backlog before it goes
  uint64_t stream;     // its number
  std::deque<Item> items;
};

class FakeFence final : public Fence {
 public:
  explicit FakeFence(std::shared_ptr<Backlog> backlog) : backlog_(std::move(backlog)) {}
  bool done() override;
  void wait() override;
  // REQUIRES: world(), as below.
  bool passed() const { return passed_; }
  void pass() { passed_ = true; }
  void force();

 private:
  const std::shared_ptr<Backlog> backlog_;
  bool passed_ = false;
  int num_polls_ = 0;
};

// One that says whether it passed, and has nothing done for that.
class QuietFence final : public Fence {
 public:
  explicit QuietFence(std::shared_ptr<FakeFence> fence) : fence_(std::move(fence)) {}
  bool done() override {
    const Locked lock(world());
    return fence_->passed();
  }
  void wait() override { fence_->wait(); }

 private:
  const std::shared_ptr<FakeFence> fence_;
};

class FakeDevice final : public Device, public std::enable_shared_from_this<FakeDevice> {
 public:
  FakeDevice(std::string name, const FakeOptions& options)
      : name_(std::move(name)),
        arena_(options.num_bytes),
        random_(options.seed),
        work_left_(options.fail_after) {}

  const std::string& name() const override { return name_; }
  MemoryInfo memory() const override {
    const Locked lock(world());
    return {arena_.bytes_free(), arena_.num_bytes()};
  }
  std::byte* allocate(size_t num_bytes) override {
    const Locked lock(world());
    require_alive();
    std::byte* const memory = arena_.take(num_bytes);
    const Access access;
    if (memory != nullptr && num_bytes > 0) std::memset(memory, kPoison, num_bytes);
    return memory;
  }
  void free(std::byte* memory) noexcept override {
    if (memory == nullptr) return;
    const Locked lock(world());
    const Access access;
    std::memset(memory, kPoison, arena_.give_back(memory));
  }
  std::byte* allocate_pinned(size_t num_bytes) override {
    auto* const memory =
        static_cast<std::byte*>(::operator new(num_bytes, kPinnedAlignment, std::nothrow));
    if (memory != nullptr && num_bytes > 0) std::memset(memory, kPoison, num_bytes);
    return memory;
  }
  void free_pinned(std::byte* memory) noexcept override {
    ::operator delete(memory, kPinnedAlignment);
  }
  std::string identity() const override { return name_.substr(0, name_.find('?')); }
  std::string export_block(const std::byte* block) override;
  std::byte* import_block(const std::string& handle) override;
  void end_import(std::byte* block) noexcept override {
    const Locked lock(world());
    imports_.erase(block);
  }
  std::unique_ptr<Queue> make_queue() override;
  std::unique_ptr<Queue> borrow_queue(uint64_t stream) override;

  // ---- the work. REQUIRES: world()

  void require_alive() const {
    if (!failure_.empty()) {
      throw Error(ErrorCode::DEVICE_FAILED, "device " + name_ + " failed: " + failure_);
    }
  }
  bool lives() const { return failure_.empty(); }
  // As CUDA refuses it, wherever the next allocation lies.
  void require_one_allocation(const void* memory, size_t num_bytes) const {
    if (!arena_.leaves_allocation(static_cast<const std::byte*>(memory), num_bytes)) return;
    throw Error(ErrorCode::DEVICE_FAILED,
                "device " + name_ + " failed: a copy goes over the end of an allocation");
  }
  void add(const std::shared_ptr<Backlog>& backlog) { backlogs_.push_back(backlog); }
  void remove(const std::shared_ptr<Backlog>& backlog) { std::erase(backlogs_, backlog); }
  uint64_t next_stream() { return ++last_stream_; }
  std::shared_ptr<Backlog> backlog_of(uint64_t stream) const {
    for (const auto& backlog : backlogs_) {
      if (backlog->stream == stream) return backlog;
    }
    throw Error(ErrorCode::BAD_ARGUMENT,
                "device " + name_ + " has no stream " + std::to_string(stream));
  }
  uint64_t draw(uint64_t below) { return random_() % below; }
  template <class Part>
  void shuffle(std::vector<Part>& batch) {
    std::shuffle(batch.begin(), batch.end(), random_);
  }

  // Does some work that may be done, of any queue: perhaps none.
  void disturb() {
    for (uint64_t steps = draw(4); steps > 0 && !backlogs_.empty(); --steps) {
      Backlog& backlog = *backlogs_[draw(backlogs_.size())];
      if (backlog.items.empty()) continue;
      const auto* awaited = static_cast<const FakeFence*>(backlog.items.front().awaited.get());
      if (awaited == nullptr || awaited->passed()) step(backlog);
    }
  }
  // Does what comes first.
  void step(Backlog& backlog) {
    const FenceRef awaited = backlog.items.front().awaited;
    if (awaited) static_cast<FakeFence&>(*awaited).force();
    const Item item = std::move(backlog.items.front());
    backlog.items.pop_front();
    if (item.passed) item.passed->pass();
    if (item.work) work(item.work);
  }

 private:
  void work(const std::function<void()>& item) {
    require_alive();
    if (work_left_-- == 0) {
      failure_ = "it was told to";
      require_alive();
    }
    const Access access;
    item();
  }

  const std::string name_;
  Arena arena_;
  std::map<const std::byte*, std::unique_ptr<Region>> imports_;  // by the block's first byte
  std::vector<std::shared_ptr<Backlog>> backlogs_;
  uint64_t last_stream_ = 2;  // 1 and 2 mean something to CUDA
  std::mt19937_64 random_;
  uint64_t work_left_;
  std::string failure_;
};

bool FakeFence::done() {
  const Locked lock(world());
  if (passed_) return true;
  FakeDevice& device = *backlog_->device;
  device.require_alive();
  device.disturb();
  if (!passed_ && (++num_polls_ >= kMostPolls || device.draw(3) == 0)) force();
  return passed_;
}

void FakeFence::wait() {
  const Locked lock(world());
  if (passed_) return;
  backlog_->device->disturb();
  force();
}

void FakeFence::force() {
  while (!passed_) {
    backlog_->device->require_alive();
    backlog_->device->step(*backlog_);
  }
}

class FakeQueue final : public Queue {
 public:
  explicit FakeQueue(std::shared_ptr<FakeDevice> device)
      : device_(std::move(device)), borrowed_(false) {
    const Locked lock(world());
    backlog_ = std::make_shared<Backlog>(Backlog{device_.get(), device_->next_stream(), {}});
    device_->add(backlog_);
  }
  FakeQueue(std::shared_ptr<FakeDevice> device, std::shared_ptr<Backlog> backlog)
      : device_(std::move(device)), borrowed_(true), backlog_(std::move(backlog)) {}
  ~FakeQueue() override {
    const Locked lock(world());
    if (borrowed_ && scratch_.empty() && tables_.empty()) return;
    try {
      while (device_->lives() && !backlog_->items.empty()) device_->step(*backlog_);
    } catch (const Error&) {
    }
    if (borrowed_) return;
    backlog_->items.clear();  // if it failed, what was queued is never done
    device_->remove(backlog_);
  }
  FakeQueue(const FakeQueue&) = delete;
  FakeQueue& operator=(const FakeQueue&) = delete;

  FenceRef record() override { return mark(); }
  void wait_for(const FenceRef& fence) override { add({{}, fence, {}}); }

  void copy_in(void* to, const void* from_host, size_t num_bytes) override {
    copy(to, from_host, num_bytes);
  }
  void copy_out(void* to_host, const void* from, size_t num_bytes) override {
    copy(to_host, from, num_bytes);
  }
  void copy(void* to, const void* from, size_t num_bytes) override {
    if (num_bytes == 0) return;
    const Locked lock(world());
    device_->require_one_allocation(to, num_bytes);
    device_->require_one_allocation(from, num_bytes);
    add_work([=] { std::memmove(to, from, num_bytes); });
  }
  void copy_pieces(std::span<const CopyPiece> pieces) override {
    if (pieces.empty()) return;
    if (pieces.size() == 1) return copy(pieces[0].to, pieces[0].from, pieces[0].num_bytes);
    std::vector<CopyPiece> batch(pieces.begin(), pieces.end());
    const Locked lock(world());  // for the order that is drawn
    device_->shuffle(batch);
    launch(pieces.size(), [batch = std::move(batch)] {
      for (const CopyPiece& piece : batch) std::memmove(piece.to, piece.from, piece.num_bytes);
    });
  }
  void zero(void* to, size_t num_bytes) override {
    if (num_bytes == 0) return;
    add_work([=] { std::memset(to, 0, num_bytes); });
  }

  void reduce_update(std::span<const SliceUpdate> updates) override {
    if (updates.empty()) return;
    std::vector<OwnedUpdate> batch(updates.begin(), updates.end());
    const Locked lock(world());  // for the order that is drawn
    device_->shuffle(batch);
    launch(updates.size(), [batch = std::move(batch)] {
      for (const OwnedUpdate& update : batch) psstore::reduce_update(update.whole());
    });
  }
  void reduced_squares(std::span<const SliceUpdate> updates, double* sums) override {
    if (updates.empty()) return;
    const std::vector<OwnedUpdate> batch(updates.begin(), updates.end());
    launch(updates.size(), [batch, sums] {
      for (size_t i = 0; i < batch.size(); ++i) {
        sums[i] = psstore::reduced_squares(batch[i].whole());
      }
    });
  }
  void convert(DType from, DType to, const void* source, void* destination,
               int64_t num_elems) override {
    add_work([=] { psstore::convert(from, to, source, destination, num_elems); });
  }
  void encode(std::span<const ToEncode> slices) override { add_encoding(slices, psstore::encode); }
  void encode_changes(std::span<const ToEncode> slices) override {
    add_encoding(slices, psstore::encode_change);
  }
  void decode(const Encoded& encoded, void* destination) override {
    add_work([=] { psstore::decode(encoded, destination); });
  }
  std::byte* scratch(size_t num_bytes) override { return scratch_.of(*this, num_bytes); }
  uint64_t stream() const override { return backlog_->stream; }

 private:
  template <class Encode>
  void add_encoding(std::span<const ToEncode> slices, Encode encode_one) {
    if (slices.empty()) return;
    std::vector<ToEncode> batch(slices.begin(), slices.end());
    const Locked lock(world());  // for the order that is drawn
    device_->shuffle(batch);
    launch(slices.size(), [batch = std::move(batch), encode_one] {
      for (const ToEncode& what : batch) encode_one(what);
    });
  }
  // A batch, for which a GPU's launch has a table.
  void launch(size_t num_slices, std::function<void()> work) {
    const Locked lock(world());
    tables_.take(num_slices * kTableBytesPerSlice);
    add_work(std::move(work));
    tables_.used_until(std::make_shared<QuietFence>(mark()));
  }
  std::shared_ptr<FakeFence> mark() {
    const Locked lock(world());
    device_->require_alive();
    auto fence = std::make_shared<FakeFence>(backlog_);
    backlog_->items.push_back({{}, {}, fence});
    return fence;
  }
  void add_work(std::function<void()> work) { add({std::move(work), {}, {}}); }
  void add(Item item) {
    const Locked lock(world());
    device_->require_alive();
    backlog_->items.push_back(std::move(item));
    if (device_->draw(4) == 0) device_->disturb();
  }

  const std::shared_ptr<FakeDevice> device_;
  const bool borrowed_;
  std::shared_ptr<Backlog> backlog_;
  LaunchTables tables_{*device_, kTableBytesPerSlice};
  Scratch scratch_{*device_};
};

// A handle: "offset size path", of the exporter's file.
std::string FakeDevice::export_block(const std::byte* block) {
  const MemoryFile& file = arena_.file();
  return std::to_string(arena_.offset_of(block)) + " " + std::to_string(file.num_bytes()) + " " +
         file.path();
}

std::byte* FakeDevice::import_block(const std::string& handle) {
  std::istringstream words(handle);
  size_t offset = 0, num_bytes = 0;
  std::string path;
  words >> offset >> num_bytes >> path;
  const int fd = words ? open(path.c_str(), O_RDWR | O_CLOEXEC) : -1;
  if (fd < 0) {
    throw Error(ErrorCode::BAD_ARGUMENT,
                "device " + name_ + " can't import '" + handle + "': its process is not to be had");
  }
  const Locked lock(world());
  auto region = std::make_unique<Region>(fd, num_bytes);
  close(fd);
  std::byte* const block = region->base() + offset;
  imports_[block] = std::move(region);
  return block;
}

std::unique_ptr<Queue> FakeDevice::make_queue() {
  return std::make_unique<FakeQueue>(shared_from_this());
}

std::unique_ptr<Queue> FakeDevice::borrow_queue(uint64_t stream) {
  const Locked lock(world());
  return std::make_unique<FakeQueue>(shared_from_this(), backlog_of(stream));
}

}  // namespace

std::shared_ptr<Device> make_fake_device(const std::string& name, const FakeOptions& options) {
  const Locked lock(world());
  return std::make_shared<FakeDevice>(name, options);
}

}  // namespace psstore::device
