// From a device's name to the device.
#include <charconv>
#include <utility>

#include "device/device.h"
#include "device/fake_device.h"

namespace psstore::device {
namespace {

[[noreturn]] void refuse(const std::string& name) {
  throw Error(ErrorCode::BAD_ARGUMENT,
              "device '" + name + "' is none; expected cpu, cuda:0, cuda:1 and so on" +
                  " (fake:0, in tests, takes ?seed=, bytes= and fail_after=)");
}

uint64_t number_of(const std::string& name, std::string_view digits) {
  uint64_t value = 0;
  const auto [end, failed] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
  if (failed != std::errc() || end != digits.data() + digits.size()) refuse(name);
  return value;
}

// The text before the first `separator` (all of it, if there is none), taken off `rest` with it.
std::string_view take_until(std::string_view& rest, char separator) {
  const size_t end = rest.find(separator);
  const std::string_view taken = rest.substr(0, end);
  rest = end == std::string_view::npos ? std::string_view() : rest.substr(end + 1);
  return taken;
}

FakeOptions fake_options(const std::string& name, std::string_view query) {
  FakeOptions options;
  while (!query.empty()) {
    std::string_view value = take_until(query, '&');
    const std::string_view option = take_until(value, '=');
    if (option == "seed") {
      options.seed = number_of(name, value);
    } else if (option == "bytes") {
      options.num_bytes = number_of(name, value);
    } else if (option == "fail_after") {
      options.fail_after = number_of(name, value);
    } else {
      refuse(name);
    }
  }
  return options;
}

}  // namespace

std::shared_ptr<Device> open_device(const std::string& name) {
  std::string_view query = name;
  std::string_view index = take_until(query, '?');
  const std::string_view kind = take_until(index, ':');
  if (kind == "fake" && number_of(name, index) < 64) {
    return make_fake_device(name, fake_options(name, query));
  }
  if (kind != "cuda" || !query.empty()) refuse(name);
  const uint64_t ordinal = number_of(name, index);
  if (ordinal > 1023) refuse(name);
  return open_cuda_device(name, static_cast<int>(ordinal));
}

}  // namespace psstore::device
