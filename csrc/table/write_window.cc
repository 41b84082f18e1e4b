#include "table/write_window.h"

#include <algorithm>

namespace psstore {

// ---- what was refused -------------------------------------------------------------------------------

void Refusals::note(uint64_t sequence, std::span<const SliceEntry> entries) {
  for (uint32_t i = 0; i < entries.size(); ++i) {
    const ErrorCode status = entries[i].status;
    if (status == ErrorCode::OK) continue;
    const RefusedRun before{sequence, runs.empty() ? 0 : runs.back().begin, i, status};
    if (!runs.empty() && runs.back() == before) {
      ++runs.back().end;
    } else {
      runs.push_back({sequence, i, i + 1, status});
    }
  }
  if (runs.size() <= kMaxRefusedRuns) return;
  forgotten = runs[runs.size() - kMaxRefusedRuns - 1].sequence;
  std::erase_if(runs, [this](const RefusedRun& run) { return run.sequence <= forgotten; });
}

void Refusals::recall(uint64_t sequence, std::span<SliceEntry> entries) const {
  if (sequence <= forgotten) {
    throw Error(ErrorCode::OVERLOADED,
                "write " + std::to_string(sequence) +
                    " came before, and so much was refused since that it is not known any more"
                    " which of its slices were; pull them to see");
  }
  for (SliceEntry& entry : entries) entry.status = ErrorCode::OK;
  auto run = std::ranges::lower_bound(runs, sequence, {}, &RefusedRun::sequence);
  for (; run != runs.end() && run->sequence == sequence; ++run) {
    const size_t end = std::min<size_t>(run->end, entries.size());
    for (size_t i = run->begin; i < end; ++i) entries[i].status = run->status;
  }
}

void Refusals::check(const std::string& client, uint64_t last) const {
  RefusedRun before{forgotten, 0, UINT32_MAX, ErrorCode::OK};
  bool fits = forgotten <= last && runs.size() <= kMaxRefusedRuns;
  for (const RefusedRun& run : runs) {
    const bool comes_later = run.sequence > before.sequence ||
                             (run.sequence == before.sequence && run.begin >= before.end);
    fits &= comes_later && run.begin < run.end && run.sequence <= last && is_failure(run.status) &&
            is_error_code(static_cast<uint8_t>(run.status));
    before = run;
  }
  if (fits) return;
  throw Error(ErrorCode::BAD_BODY,
              "what was refused of writes of client " + client +
                  " is not in order, too much, or of writes after its last, which is " +
                  std::to_string(last));
}

// ---- the window -------------------------------------------------------------------------------------

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

std::vector<std::pair<std::string, Refusals>> WriteWindow::refusals() {
  std::vector<std::pair<std::string, Refusals>> found;
  const MutexLock lock(mutex_);
  for (auto one = latest_first_.rbegin(); one != latest_first_.rend(); ++one) {
    const MutexLock client_lock(one->client->mutex);
    if (one->client->refusals != Refusals{}) found.emplace_back(one->name, one->client->refusals);
  }
  return found;
}

void WriteWindow::load_refusals(const std::string& name, Refusals refusals) {
  std::shared_ptr<Client> client;
  {
    const MutexLock lock(mutex_);
    const auto known = by_name_.find(name);
    if (known != by_name_.end()) client = known->second->client;
  }
  if (client == nullptr) {
    throw Error(ErrorCode::BAD_BODY, "there is what was refused of writes of client " + name +
                                         ", which has written nothing");
  }
  const MutexLock lock(client->mutex);
  refusals.check(name, client->last);
  client->refusals = std::move(refusals);
}

}  // namespace psstore
