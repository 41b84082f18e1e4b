#include "table/write_window.h"

#include "core/errors.h"

namespace psstore {

bool WriteWindow::Client::take(uint64_t sequence) {
  if (sequence != 0 && sequence <= last) return false;
  if (sequence != last + 1) {
    throw Error(ErrorCode::UNEXPECTED_MESSAGE, "write " + std::to_string(sequence) +
                                                   " came where write " + std::to_string(last + 1) +
                                                   " was expected; send the missing ones first");
  }
  last = sequence;
  return true;
}

std::shared_ptr<WriteWindow::Client> WriteWindow::client(const std::string& name) {
  const MutexLock lock(mutex_);
  const auto known = by_name_.find(name);
  if (known != by_name_.end()) {
    latest_first_.splice(latest_first_.begin(), latest_first_, known->second);
    return known->second->client;
  }
  latest_first_.push_front({name, std::make_shared<Client>()});
  by_name_.emplace(name, latest_first_.begin());
  if (by_name_.size() > max_clients_) {
    by_name_.erase(latest_first_.back().name);
    latest_first_.pop_back();
  }
  return latest_first_.front().client;
}

uint64_t WriteWindow::last_sequence(const std::string& name) {
  std::shared_ptr<Client> client;
  {
    const MutexLock lock(mutex_);
    const auto known = by_name_.find(name);
    if (known == by_name_.end()) return 0;
    client = known->second->client;
  }
  const MutexLock lock(client->mutex);
  return client->last;
}

std::vector<std::pair<std::string, uint64_t>> WriteWindow::all() {
  std::vector<std::pair<std::string, uint64_t>> clients;
  const MutexLock lock(mutex_);
  for (auto one = latest_first_.rbegin(); one != latest_first_.rend(); ++one) {
    const MutexLock client_lock(one->client->mutex);
    clients.emplace_back(one->name, one->client->last);
  }
  return clients;
}

void WriteWindow::load(const std::vector<std::pair<std::string, uint64_t>>& clients) {
  for (const auto& [name, last] : clients) {
    const std::shared_ptr<Client> place = client(name);
    const MutexLock lock(place->mutex);
    place->last = last;
  }
}

}  // namespace psstore
