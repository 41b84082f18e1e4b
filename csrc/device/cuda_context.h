// A GPU's primary context for a while: what was a thread's current one before, if anything, is so again.
//
// cudaSetDevice() can't give back nothing: it would make a context on device 0, which takes half a gigabyte there
// and is refused where that GPU is somebody else's. So the driver's stack of contexts is used, looked up when it is
// first needed, because the extension loads without a driver. Contexts are compared, and not devices: a thread may have
// none, or one of its own making on the same GPU, of which our streams and events are not.
#pragma once

#include <cuda.h>
#include <dlfcn.h>

#include <mutex>
#include <string>

#include "core/errors.h"

namespace psstore::device {

// The driver's functions.
struct ContextCalls {
  decltype(&cuDevicePrimaryCtxRetain) retain;
  decltype(&cuCtxGetCurrent) current;
  decltype(&cuCtxPushCurrent) push;
  decltype(&cuCtxPopCurrent) pop;

  // Throws Error(DEVICE_FAILED) where there is no driver, or none that has them.
  static const ContextCalls& get() {
    static const ContextCalls calls = found();
    return calls;
  }

 private:
  static ContextCalls found() {
    void* const driver = dlopen("libcuda.so.1", RTLD_NOW);
    ContextCalls calls{};
    look_up(driver, "cuDevicePrimaryCtxRetain", calls.retain);
    look_up(driver, "cuCtxGetCurrent", calls.current);
    look_up(driver, "cuCtxPushCurrent_v2", calls.push);
    look_up(driver, "cuCtxPopCurrent_v2", calls.pop);
    return calls;
  }
  template <class Function>
  static void look_up(void* driver, const char* name, Function& function) {
    if (driver != nullptr) function = reinterpret_cast<Function>(dlsym(driver, name));
    if (function == nullptr) {
      throw Error(ErrorCode::DEVICE_FAILED, std::string("the CUDA driver has no ") + name);
    }
  }
};

// Throws Error(DEVICE_FAILED).
inline void require_call(CUresult status, const char* call) {
  if (status == CUDA_SUCCESS) return;
  throw Error(ErrorCode::DEVICE_FAILED,
              std::string(call) + ": CUDA error " + std::to_string(static_cast<int>(status)));
}

// Of a device: retained when it is first asked for, and kept for the life of the process, as the runtime does.
class PrimaryContext {
 public:
  explicit PrimaryContext(int device) : device_(device) {}

  CUcontext get() {
    std::call_once(once_, [this] {
      require_call(ContextCalls::get().retain(&context_, device_), "cuDevicePrimaryCtxRetain");
    });
    return context_;
  }

 private:
  const int device_;
  std::once_flag once_;
  CUcontext context_ = nullptr;
};

// The calling thread's current one, if any.
inline CUcontext current_context() {
  CUcontext context = nullptr;
  require_call(ContextCalls::get().current(&context), "cuCtxGetCurrent");
  return context;
}

// While it is there, the context is the calling thread's current one.
class PushedContext {
 public:
  explicit PushedContext(CUcontext context) {
    require_call(ContextCalls::get().push(context), "cuCtxPushCurrent");
  }
  ~PushedContext() {
    CUcontext context = nullptr;
    ContextCalls::get().pop(&context);
  }
  PushedContext(const PushedContext&) = delete;
  PushedContext& operator=(const PushedContext&) = delete;
};

}  // namespace psstore::device
