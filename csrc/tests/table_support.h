// Short ways to say what table tests say often: payloads, slices of them, decisions, errors.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "core/buffer.h"
#include "table/decision.h"
#include "table/device_backend.h"
#include "table/host_backend.h"
#include "table/staging.h"

namespace psstore::testing {

using Floats = std::vector<float>;

inline std::shared_ptr<BufferPool> make_pool() {
  return BufferPool::create(1 << 20);
}

inline std::shared_ptr<Backend> make_backend(const std::string& device) {
  if (device == "cpu") return std::make_shared<HostBackend>(make_pool());
  return std::make_shared<DeviceBackend>(device::open_device(device));
}

// Where slots may live: what a suite says of them holds on each.
class OnDevices : public ::testing::TestWithParam<std::string> {};
inline auto all_devices() {
  return ::testing::Values("cpu", "fake:0?seed=1", "fake:0?seed=2");
}
#define PSSTORE_ON_DEVICES(Suite) \
  INSTANTIATE_TEST_SUITE_P(Devices, Suite, psstore::testing::all_devices())

template <typename T>
BufferRef buffer_of(BufferPool& pool, const std::vector<T>& values) {
  BufferRef buffer = pool.allocate(values.size() * sizeof(T));
  if (!values.empty()) std::memcpy(buffer->data(), values.data(), buffer->size());
  return buffer;
}

inline PayloadSlice slice_of(BufferPool& pool, const Floats& values) {
  return {buffer_of(pool, values), 0, values.size() * sizeof(float), DType::kFloat32};
}

// As a payload that has arrived is brought to slots.
template <typename T>
BufferRef brought_to(Backend& backend, const std::vector<T>& values) {
  BufferRef payload = backend.allocate_payload(values.size() * sizeof(T));
  if (!values.empty()) std::memcpy(payload->data(), values.data(), payload->size());
  return backend.bring(payload);
}
inline PayloadSlice slice_of(Backend& backend, const Floats& values) {
  return {brought_to(backend, values), 0, values.size() * sizeof(float), DType::kFloat32};
}

template <typename T = float>
std::vector<T> elements_of(const void* data, size_t num_bytes) {
  std::vector<T> values(num_bytes / sizeof(T));
  if (!values.empty()) std::memcpy(values.data(), data, num_bytes);
  return values;
}

inline Floats floats_of(const BufferRef& buffer) {
  return elements_of(buffer->data(), buffer->size());
}

// Once it is there.
template <typename T = float>
std::vector<T> elements_of(const std::vector<Piece>& pieces, const device::FenceRef& ready) {
  if (ready) ready->wait();
  std::vector<T> all;
  for (const Piece& piece : pieces) {
    const std::vector<T> part = elements_of<T>(piece.buffer->data(), piece.num_bytes);
    all.insert(all.end(), part.begin(), part.end());
  }
  return all;
}

inline std::map<std::string, double> sgd(double lr, double momentum = 0) {
  return {{"lr", lr},      {"momentum", momentum}, {"dampening", 0},
          {"nesterov", 0}, {"weight_decay", 0},    {"maximize", 0}};
}

// A member with a gradient for every tensor but those in `lacking`, which is ascending.
inline Member member(uint32_t rank, uint64_t round, const std::vector<uint64_t>& lacking = {}) {
  std::vector<std::pair<uint64_t, uint64_t>> present;
  uint64_t next = 0;
  for (const uint64_t id : lacking) {
    if (id > next) present.emplace_back(next, id - 1);
    next = id + 1;
  }
  present.emplace_back(next, std::numeric_limits<uint64_t>::max());
  return {{rank, 1, round}, 1.0F, std::move(present)};
}

// Plain SGD with lr 1 in group 0: what is staged is subtracted.
inline Decision decision(uint64_t number, std::vector<Member> members, bool skip = false) {
  return Decision(number, skip, 1.0, std::move(members), {{0, sgd(1.0)}});
}

// The same, made before its contributions, or to wait for a scale.
inline Decision open_decision(uint64_t number, std::vector<Member> members, Open open) {
  return Decision(number, false, 1.0, std::move(members), {{0, sgd(1.0)}}, open);
}
inline Decision early_decision(uint64_t number, std::vector<Member> members) {
  return open_decision(number, std::move(members), Open::kContributions);
}
inline Decision scaled_decision(uint64_t number, std::vector<Member> members) {
  return open_decision(number, std::move(members), Open::kScale);
}

// The message of the Error that `call` has to throw.
inline std::string error_of(ErrorCode expected, const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), expected) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "nothing was thrown";
  return "";
}

}  // namespace psstore::testing
