#include "tls/openssl.h"

#include <dlfcn.h>

#include "core/errors.h"

namespace psstore::openssl {
namespace {

// Best first. One that is loaded already, such as Python's, is found by its name wherever it lies.
constexpr const char* kNames[] = {"libssl.so.3", "libssl.so.1.1"};

[[noreturn]] void throw_missing(const std::string& why) {
  throw Error(ErrorCode::TLS_FAILED,
              "TLS needs OpenSSL 1.1.1 or newer, and there is none here (" + why +
                  "): install your system's libssl, as apt install libssl3 or dnf install "
                  "openssl-libs");
}

Library load() {
  void* handle = nullptr;
  for (const char* const name : kNames) {
    if (handle == nullptr) handle = dlopen(name, RTLD_NOW | RTLD_LOCAL);
  }
  if (handle == nullptr) throw_missing("no libssl.so.3 and no libssl.so.1.1");
  Library found{};
#define PSSTORE_X(name, ...)                                                 \
  found.name = reinterpret_cast<decltype(found.name)>(dlsym(handle, #name)); \
  if (found.name == nullptr) throw_missing("it has no " #name);
  PSSTORE_OPENSSL_FUNCTIONS(PSSTORE_X)
#undef PSSTORE_X
  return found;
}

}  // namespace

const Library& library() {
  static const Library loaded = load();
  return loaded;
}

Failure take_failure() {
  const Library& ssl = library();
  const unsigned long code = ssl.ERR_peek_error();
  ssl.ERR_clear_error();
  if (code == 0) return {0, "no reason given"};
  const char* const text = ssl.ERR_reason_error_string(code);
  // The lowest twelve bits are the reason in every version that has a number used here.
  return {static_cast<int>(code & 0xFFF), text == nullptr ? "no reason given" : text};
}

}  // namespace psstore::openssl
