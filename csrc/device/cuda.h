// CUDA memory and streams by RAII, and its errors as exceptions.
//
// Only *_cuda.cu files include this. A name ending in _async returns before the device has done it;
// everything else that waits says so.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>
#include <utility>

#include "core/errors.h"

namespace psstore::device {

// Throws Error(INTERNAL) that names the call and CUDA's reason.
inline void check(cudaError_t status, const char* call) {
  if (status == cudaSuccess) return;
  throw Error(ErrorCode::INTERNAL, std::string(call) + ": " + cudaGetErrorString(status));
}

class Stream {
 public:
  Stream() {
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
  }
  ~Stream() { cudaStreamDestroy(stream_); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  cudaStream_t get() const { return stream_; }

  // Waits for everything given to the stream so far; throws what went wrong in it.
  void synchronize() const { check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize"); }

 private:
  cudaStream_t stream_ = nullptr;
};

// Owns `size` elements of device memory, uninitialised. REQUIRES: the stream that uses them is
// synchronised before this is destroyed.
template <class T>
class Array {
 public:
  explicit Array(int64_t size) : size_(size) {
    check(cudaMalloc(reinterpret_cast<void**>(&data_), num_bytes()), "cudaMalloc");
  }
  Array(const T* host, int64_t size, cudaStream_t stream) : Array(size) {
    copy_from_async(host, stream);
  }
  Array(Array&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
  Array& operator=(Array&&) = delete;
  ~Array() { cudaFree(data_); }

  T* data() const { return data_; }

  // `host` has size() elements and outlives the copy.
  void copy_from_async(const T* host, cudaStream_t stream) {
    check(cudaMemcpyAsync(data_, host, num_bytes(), cudaMemcpyHostToDevice, stream),
          "cudaMemcpyAsync to the device");
  }
  void copy_to_async(T* host, cudaStream_t stream) const {
    check(cudaMemcpyAsync(host, data_, num_bytes(), cudaMemcpyDeviceToHost, stream),
          "cudaMemcpyAsync to the host");
  }

 private:
  size_t num_bytes() const { return static_cast<size_t>(size_) * sizeof(T); }

  T* data_ = nullptr;
  int64_t size_ = 0;
};

}  // namespace psstore::device
