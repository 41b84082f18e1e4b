// The server and the worker of ps-lite in `rows`: rows of an unordered map with Adagrad in its server, in every role.
//
//   ps_lite_rows DIM ROWS IDS FILE RATE EPS   takes a step for each line that it reads, and prints one; ends with its input
//
// FILE: sets of IDS ids, uint64, ascending. A step pulls the rows of the next set, and pushes a gradient for each.

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <random>
#include <string>
#include <unordered_map>
#include <vector>

#include "ps/ps.h"

namespace {

using Floats = ps::SArray<float>;
using Keys = ps::SArray<ps::Key>;

// ---- server ----

class Server {
 public:
  Server(size_t dim, size_t num_rows, float rate, float eps) : dim_(dim), rate_(rate), eps_(eps) {
    records_.resize(num_rows * 2 * dim);
    places_.reserve(num_rows);
    for (size_t id = 0; id < num_rows; ++id) places_[id] = &records_[id * 2 * dim];
  }

  void handle(const ps::KVMeta& meta, const ps::KVPairs<float>& data, ps::KVServer<float>* server) {
    ps::KVPairs<float> answer;
    if (meta.push) {
      for (size_t i = 0; i < data.keys.size(); ++i)
        step(places_.at(data.keys[i]), data.vals.data() + i * dim_);
    } else {
      answer.keys = data.keys;
      answer.vals.resize(data.keys.size() * dim_);
      for (size_t i = 0; i < data.keys.size(); ++i) {
        const float* row = places_.at(data.keys[i]);
        std::copy(row, row + dim_, answer.vals.data() + i * dim_);
      }
    }
    server->Response(meta, answer);
  }

 private:
  void step(float* row, const float* gradient) {
    float* sums = row + dim_;
    for (size_t i = 0; i < dim_; ++i) {
      sums[i] += gradient[i] * gradient[i];
      row[i] -= rate_ * gradient[i] / (std::sqrt(sums[i]) + eps_);
    }
  }

  size_t dim_;
  float rate_, eps_;
  std::vector<float> records_;  // a row's value and its sums
  std::unordered_map<ps::Key, float*> places_;
};

// ---- worker ----

class Worker {
 public:
  Worker(size_t dim, size_t num_ids, const char* path) : client_(0, 0), gradients_(num_ids * dim) {
    std::ifstream file(path, std::ios::binary);
    for (std::vector<uint64_t> ids(num_ids);
         file.read(reinterpret_cast<char*>(ids.data()), num_ids * sizeof(uint64_t));)
      sets_.emplace_back(Keys(std::vector<ps::Key>(ids.begin(), ids.end())));
    std::minstd_rand random(1);
    std::normal_distribution<float> normal;
    for (float& element : gradients_) element = normal(random);
  }

  void step() {
    const Keys& keys = sets_[turn_++ % sets_.size()];
    client_.Wait(client_.ZPull(keys, &values_));
    client_.Wait(client_.ZPush(keys, gradients_));
  }

 private:
  ps::KVWorker<float> client_;
  std::vector<Keys> sets_;
  Floats gradients_, values_;
  size_t turn_ = 0;
};

}  // namespace

int main(int, char** arguments) {
  const size_t dim = std::strtoull(arguments[1], nullptr, 10);
  const size_t num_rows = std::strtoull(arguments[2], nullptr, 10);
  const size_t num_ids = std::strtoull(arguments[3], nullptr, 10);
  ps::Start(0);
  if (ps::IsServer()) {
    auto* server = new ps::KVServer<float>(0);
    auto* state = new Server(dim, num_rows, std::strtof(arguments[5], nullptr), std::strtof(arguments[6], nullptr));
    server->set_request_handle([state](const auto& meta, const auto& data, auto* self) {
      state->handle(meta, data, self);
    });
    ps::RegisterExitCallback([server] { delete server; });
  }
  if (ps::IsWorker()) {
    Worker worker(dim, num_ids, arguments[4]);
    std::printf("ready\n");
    std::fflush(stdout);
    for (std::string line; std::getline(std::cin, line);) {
      worker.step();
      std::printf("done\n");
      std::fflush(stdout);
    }
  }
  ps::Finalize(0, true);
}
