// The server and the workers of ps_lite.py: DMLC's ps-lite with SGD in its server, in every role.
//
//   ps_lite RATE SIZES   reads lines "t" or "a", takes a round for each, and prints the last parameter's last element;
//                        ends with its input
//
// SIZES: elements of each tensor, with commas. A round is a ZPushPull for each tensor ("t") or one of all ("a").
// Nothing is copied where ps-lite does not copy: gradients are sent from, and parameters kept in, memory of our own.

#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <map>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "ps/ps.h"

namespace {

using Floats = ps::SArray<float>;

constexpr size_t kCacheBytes = 80 << 20;  // data rotates over more than the last-level cache

std::vector<int> parse(const std::string& sizes) {
  std::vector<int> parsed;
  std::istringstream stream(sizes);
  for (std::string size; std::getline(stream, size, ',');) parsed.push_back(std::stoi(size));
  return parsed;
}

// ---- server ----

// Keeps every worker's request for a key set until all are there, then steps and answers them.
class Server {
 public:
  Server(float rate, const std::vector<int>& sizes) : rate_(rate) {
    for (int size : sizes) parameters_.emplace_back(size, 0.0f);
  }

  void handle(const ps::KVMeta& meta, const ps::KVPairs<float>& data, ps::KVServer<float>* server) {
    auto& waiting = waiting_[{data.keys.front(), data.keys.size()}];
    waiting.push_back({meta, data});
    if (waiting.size() < static_cast<size_t>(ps::NumWorkers())) return;
    ps::KVPairs<float> answer;
    answer.keys = data.keys;
    if (data.keys.size() == 1) {  // the parameter's own memory is sent
      step(waiting, data.keys.front(), 0);
      answer.vals = parameters_[data.keys.front()];
      answer.lens = data.lens;
    } else {
      size_t at = 0;
      for (ps::Key key : data.keys) {
        step(waiting, key, at);
        at += parameters_[key].size();
      }
      answer.vals.resize(at);
      answer.lens = data.lens;
      at = 0;
      for (ps::Key key : data.keys) {
        std::copy(parameters_[key].begin(), parameters_[key].end(), answer.vals.data() + at);
        at += parameters_[key].size();
      }
    }
    for (auto& [request, unused] : waiting) server->Response(request, answer);
    waiting.clear();
  }

 private:
  using Requests = std::vector<std::pair<ps::KVMeta, ps::KVPairs<float>>>;

  void step(const Requests& requests, ps::Key key, size_t at) {
    Floats& parameter = parameters_[key];
    const float scale = rate_ / static_cast<float>(requests.size());
    for (const auto& [unused, data] : requests) {
      const float* gradient = data.vals.data() + at;
      float* value = parameter.data();
      for (size_t i = 0; i < parameter.size(); ++i) value[i] -= scale * gradient[i];
    }
  }

  float rate_;
  std::vector<Floats> parameters_;
  std::map<std::pair<ps::Key, size_t>, Requests> waiting_;
};

// ---- worker ----

class Worker {
 public:
  explicit Worker(const std::vector<int>& sizes) : sizes_(sizes), client_(0, 0) {
    size_t total = 0;
    for (int size : sizes) total += size;
    for (size_t held = 0; held < kCacheBytes; held += 8 * total) sets_.push_back(make_set());
    for (size_t i = 0; i < sizes.size(); ++i) keys_.push_back(i);
  }

  void round(bool together) {
    auto& set = sets_[turn_++ % sets_.size()];
    std::printf("%.9g\n", together ? at_once(set) : one_by_one(set));
    std::fflush(stdout);
  }

 private:
  struct Set {
    std::vector<Floats> gradients, parameters;
    Floats flat_gradients, flat_parameters;
  };

  Set make_set() {
    std::minstd_rand random(ps::MyRank() + 1);
    std::normal_distribution<float> normal;
    Set set;
    size_t total = 0;
    for (int size : sizes_) {
      set.gradients.emplace_back(size);
      set.parameters.emplace_back(size, 0.0f);
      for (float& element : set.gradients.back()) element = normal(random);
      total += size;
    }
    *(set.gradients.back().end() - 1) = static_cast<float>(ps::MyRank() + 1);
    set.flat_gradients = Floats(total);
    float* out = set.flat_gradients.data();
    for (const Floats& part : set.gradients) out = std::copy(part.begin(), part.end(), out);
    set.flat_parameters = Floats(total, 0.0f);
    return set;
  }

  float one_by_one(Set& set) {
    std::vector<int> under_way;
    for (size_t i = 0; i < sizes_.size(); ++i)
      under_way.push_back(client_.ZPushPull({keys_[i]}, set.gradients[i], &set.parameters[i]));
    for (int request : under_way) client_.Wait(request);
    return *(set.parameters.back().end() - 1);
  }

  float at_once(Set& set) {
    ps::SArray<int> lens(sizes_);
    client_.Wait(client_.ZPushPull(keys_, set.flat_gradients, &set.flat_parameters, &lens));
    return *(set.flat_parameters.end() - 1);
  }

  std::vector<int> sizes_;
  ps::KVWorker<float> client_;
  ps::SArray<ps::Key> keys_;
  std::vector<Set> sets_;
  size_t turn_ = 0;
};

}  // namespace

int main(int, char** arguments) {
  const std::vector<int> sizes = parse(arguments[2]);
  ps::Start(0);
  if (ps::IsServer()) {
    auto* server = new ps::KVServer<float>(0);
    auto* state = new Server(std::strtof(arguments[1], nullptr), sizes);
    server->set_request_handle([state](const auto& meta, const auto& data, auto* self) {
      state->handle(meta, data, self);
    });
    ps::RegisterExitCallback([server] { delete server; });
  }
  if (ps::IsWorker()) {
    Worker worker(sizes);
    std::printf("ready\n");
    std::fflush(stdout);
    for (std::string line; std::getline(std::cin, line);) worker.round(line == "a");
  }
  ps::Finalize(0, true);
}
