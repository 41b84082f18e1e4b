#include "shard/shard.h"

#include <cmath>

#include "core/huge_pages.h"
#include "table/host_backend.h"

namespace psstore {
namespace {

// Freed memory that the pool keeps beside what rounds needed lately: four payloads of the largest size, so that frames
// of other sizes touch no new pages either.
constexpr size_t kMaxIdleBytes = 256u << 20;
// Of slabs that were copied for somebody who has read them since, or whose rows were evicted.
constexpr size_t kMaxIdleRowBytes = 16u << 20;

std::shared_ptr<Backend> backend_of(const ShardOptions& options) {
  if (options.backend) return options.backend;
  const auto budget = host_budget(options.max_memory_bytes);
  return std::make_shared<HostBackend>(
      BufferPool::create(kMaxIdleBytes, options.arena, budget), options.arena,
      BufferPool::create_over(kMaxIdleRowBytes, std::make_shared<HugePages>(), /*or_heap=*/true,
                              budget, kSlabBytes));
}

std::map<std::string, uint64_t> told(const RowCounts& counts) {
  return {{"rows", counts.num_rows},
          {"row_bytes", counts.num_bytes},
          {"rows_evicted", counts.num_evicted},
          {"rows_refused", counts.num_refused}};
}

}  // namespace

Shard::Shard(const ShardOptions& options)
    : options_(options),
      backend_(backend_of(options)),
      changes_budget_(std::make_shared<MemoryBudget>(options.max_kept_bytes, "memory for readers",
                                                     "raise --snapshot-memory")),
      table_(options.num_stripes, backend_, counters_, ranks_, options.max_kept_bytes,
             options.notes_row_decisions ? changes_budget_ : nullptr) {
  if (options.num_stripes == 0) {
    throw Error(ErrorCode::BAD_ARGUMENT, "num_stripes is 0; a shard needs at least one");
  }
}

// ---- schema ---------------------------------------------------------------------------------------

void Shard::define(const TensorDefinition& definition) {
  definition.check();
  if (is_of_rows(definition.rule) && device() != "cpu") {
    throw Error(ErrorCode::BAD_ARGUMENT, "tensor " + std::to_string(definition.tensor_id) +
                                             " is a table of rows, and a shard on device '" +
                                             device() + "' can have none; use --device cpu");
  }
  if (definition.reduction.sorts() && device() != "cpu") {
    throw Error(ErrorCode::BAD_ARGUMENT,
                "tensor " + std::to_string(definition.tensor_id) +
                    " is to be sorted over workers, and a shard on device '" + device() +
                    "' can't; use --device cpu, or reduction 'mean'");
  }
  if (definition.compensation != 0 && device() != "cpu") {
    throw Error(ErrorCode::BAD_ARGUMENT,
                "tensor " + std::to_string(definition.tensor_id) +
                    " is to have its gradients compensated, and a shard on device '" + device() +
                    "' can't; use --device cpu, or compensation 0");
  }
  const ExclusiveLock lock(table_.decision_mutex);
  table_.define(definition);
  backend_->flush();
}

void Shard::drop(uint64_t tensor_id) {
  const ExclusiveLock lock(table_.decision_mutex);
  table_.drop(tensor_id);
  backend_->flush();
}

// ---- decisions ------------------------------------------------------------------------------------

void Shard::set_version(uint64_t version) {
  const ExclusiveLock lock(table_.decision_mutex);
  table_.set_version(version);
}

void Shard::advance(const Decision& decision) {
  if (decision.number() <= version()) return;
  const ExclusiveLock lock(table_.decision_mutex);
  if (table_.advance(decision)) {
    ranks_.record(decision);
    counters_.decisions.add();
    if (decision.skip()) counters_.skipped.add();
  }
  backend_->flush();
}

void Shard::set_scale(uint64_t number, std::optional<double> factor) {
  if (factor && !std::isfinite(*factor)) {
    throw Error(ErrorCode::BAD_ARGUMENT, "the scale of decision " + std::to_string(number) +
                                             " is not finite; without a factor it is a skip");
  }
  const ExclusiveLock lock(table_.decision_mutex);
  if (table_.set_scale(number, factor) && !factor) counters_.skipped.add();
}

bool Shard::settle(int64_t max_slots, int64_t max_bytes) {
  const SharedLock lock(table_.decision_mutex);
  const bool settled = table_.settle(max_slots, max_bytes);
  backend_->flush();
  return settled;
}

// ---- holds ----------------------------------------------------------------------------------------

uint64_t Shard::hold(uint64_t id, bool state) {
  const ExclusiveLock lock(table_.decision_mutex);
  return table_.hold(id, state);
}

bool Shard::settle_hold(uint64_t id, uint64_t at) {
  {
    const SharedLock lock(table_.decision_mutex);
    if (table_.is_settled_hold(id, at)) return true;
  }
  const ExclusiveLock lock(table_.decision_mutex);
  return table_.settle_hold(id, at);
}

void Shard::release_hold(uint64_t id) {
  const ExclusiveLock lock(table_.decision_mutex);
  table_.release_hold(id);
}

BufferRef Shard::allocate(size_t num_bytes) {
  for (const auto make_room : {&DenseTable::forget_changes, &DenseTable::give_up_holds}) {
    try {
      return backend_->allocate_payload(num_bytes);
    } catch (const Error& error) {
      if (error.code() != ErrorCode::OUT_OF_MEMORY) throw;
    }
    const ExclusiveLock lock(table_.decision_mutex);
    (table_.*make_room)();
  }
  return backend_->allocate_payload(num_bytes);
}

void Shard::forget_changes() {
  const SharedLock lock(table_.decision_mutex);
  table_.forget_changes();
}

// ---- for people -----------------------------------------------------------------------------------

std::vector<std::pair<std::string, std::string>> Shard::state(Key key) {
  const SharedLock lock(table_.decision_mutex);
  Stripe& stripe = table_.stripe_of(key);
  const MutexLock stripe_lock(stripe.mutex);
  Slot* slot = table_.find(stripe, key);
  if (slot == nullptr) {
    throw Error(ErrorCode::UNKNOWN_KEY, "there is no slice of key " + std::to_string(key) +
                                            " on shard " + std::to_string(options_.index));
  }
  table_.bring_up_to_date(stripe, *slot);
  slot->make_zeros(*backend_);
  return slot->dump(*backend_);
}

std::map<uint64_t, std::map<std::string, uint64_t>> Shard::row_stats() {
  const SharedLock lock(table_.decision_mutex);
  std::map<uint64_t, std::map<std::string, uint64_t>> by_table;
  for (const auto& [tensor_id, counts] : table_.row_counts()) by_table[tensor_id] = told(counts);
  return by_table;
}

std::map<std::string, uint64_t> Shard::stats() {
  TableSize size;
  RowCounts rows;
  {
    const SharedLock lock(table_.decision_mutex);
    size = table_.size();
    for (const auto& [tensor_id, counts] : table_.row_counts()) rows += counts;
  }
  std::map<std::string, uint64_t> found = told(rows);
  const MemoryBudget* const budget = backend_->budget();
  found.insert({
      {"version", version()},
      {"memory_bytes", budget != nullptr ? budget->taken_bytes() : backend_->pool_bytes()},
      {"max_memory_bytes", budget != nullptr ? budget->max_bytes() : kNoMemoryLimit},
      {"slots", size.num_slots},
      {"held_slots", size.num_held},
      {"value_bytes", size.value_bytes},
      {"state_bytes", size.state_bytes},
      {"staged_bytes", size.staged_bytes},
      {"published_bytes", size.published_bytes},
      {"base_bytes", size.base_bytes},
      {"holds", size.num_holds},
      {"kept_bytes", size.kept_bytes},
      {"pool_bytes", backend_->pool_bytes()},
      {"pool_idle_bytes", backend_->pool_idle_bytes()},
      {"pushes", counters_.pushes.value()},
      {"pulls", counters_.pulls.value()},
      {"writes", counters_.writes.value()},
      {"received_bytes", counters_.received_bytes.value()},
      {"sent_bytes", counters_.sent_bytes.value()},
      {"initialised", counters_.initialised.value()},
      {"duplicates", counters_.duplicates.value()},
      {"refused", counters_.refused.value()},
      {"decisions", counters_.decisions.value()},
      {"skipped", counters_.skipped.value()},
      {"missing", counters_.missing.value()},
      {"applied_in_place", counters_.applied_in_place.value()},
      {"applied_out_of_place", counters_.applied_out_of_place.value()},
  });
  return found;
}

}  // namespace psstore
