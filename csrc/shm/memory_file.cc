#include "shm/memory_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <stdexcept>
#include <string>
#include <system_error>

namespace psstore {
namespace {

// Of Linux's asm-generic/mman-common.h, which an older C library does not tell.
constexpr int kPopulateRead = 22;
constexpr int kPopulateWrite = 23;

constexpr int kNoResizing = F_SEAL_SHRINK | F_SEAL_GROW;
constexpr int kSealFutureWrite = 0x0010;  // F_SEAL_FUTURE_WRITE, Linux 5.1

void check(bool fine, const char* what) {
  if (!fine) throw std::system_error(errno, std::generic_category(), what);
}

}  // namespace

Descriptor make_memory_file(const char* name, size_t num_bytes) {
  Descriptor file(memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING));
  check(file.get() >= 0, "memfd_create");
  check(ftruncate(file.get(), static_cast<off_t>(num_bytes)) == 0, "ftruncate of a memory file");
  check(fcntl(file.get(), F_ADD_SEALS, kNoResizing) == 0, "sealing a memory file");
  return file;
}

Descriptor reopen_readonly(const Descriptor& file) {
  const std::string path = "/proc/self/fd/" + std::to_string(file.get());
  Descriptor reopened(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  check(reopened.get() >= 0, "reopening a memory file for reading");
  return reopened;
}

void seal_writing(const Descriptor& file) {
  check(fcntl(file.get(), F_ADD_SEALS, kSealFutureWrite | F_SEAL_SEAL) == 0,
        "sealing a memory file");
}

size_t size_of_sealed(int fd) {
  const int seals = fcntl(fd, F_GET_SEALS);
  check(seals >= 0, "the seals of a memory file");
  if ((seals & kNoResizing) != kNoResizing) {
    throw std::invalid_argument("shared memory that could be resized while it is mapped");
  }
  struct stat found{};
  check(fstat(fd, &found) == 0, "the size of a memory file");
  return static_cast<size_t>(found.st_size);
}

Mapping::Mapping(int fd, size_t num_bytes, Access access)
    : size_(num_bytes), access_(access), process_(getpid()) {
  const int protection = access == Access::kRead ? PROT_READ : PROT_READ | PROT_WRITE;
  void* const mapped = mmap(nullptr, num_bytes, protection, MAP_SHARED | MAP_NORESERVE, fd, 0);
  check(mapped != MAP_FAILED, "mapping shared memory");
  data_ = static_cast<std::byte*>(mapped);
  madvise(mapped, num_bytes, MADV_DONTFORK);
  madvise(mapped, num_bytes, MADV_DONTDUMP);
}

Mapping::~Mapping() {
  if (getpid() == process_) munmap(data_, size_);
}

bool Mapping::populate(size_t offset, size_t num_bytes) const noexcept {
  const int advice = access_ == Access::kRead ? kPopulateRead : kPopulateWrite;
  int result;
  do {
    result = madvise(data_ + offset, num_bytes, advice);
  } while (result != 0 && (errno == EINTR || errno == EAGAIN));
  return result == 0;
}

bool PopulatedParts::populate(size_t offset, size_t num_bytes) {
  const size_t end = (offset + num_bytes - 1) / kBytes + 1;
  for (size_t part = offset / kBytes; part < end; ++part) {
    if (parts_[part]) continue;
    const size_t from = part * kBytes;
    if (!memory_.populate(from, std::min(kBytes, memory_.size() - from))) return false;
    parts_[part] = true;
  }
  return true;
}

size_t page_bytes() {
  static const auto bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

size_t whole_pages(size_t num_bytes) {
  return (num_bytes + page_bytes() - 1) / page_bytes() * page_bytes();
}

size_t machine_memory_bytes() {
  return static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * page_bytes();
}

}  // namespace psstore
