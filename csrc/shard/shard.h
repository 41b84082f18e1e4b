// All that one server process owns of a store: the one class that the bindings see.
//
// It speaks of slices and contributions, not of frames: a caller unpacks what arrived and packs what is to
// be sent. Requests come as slice entries (core/types.h); answers are written into the same entries,
// a status for each. What one entry asks for in vain never keeps the others from being served; only what
// is wrong with a whole call is thrown, and then nothing has changed.
//
// Thread-safe: every call may run beside every other. Nothing waits but for locks, and those are held for
// table work only. docs/table.md draws how it fits together.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "rows/changed_rows.h"
#include "shm/value_arena.h"
#include "table/dense_table.h"
#include "table/gather.h"
#include "table/rank_book.h"
#include "table/write_window.h"

namespace psstore {

struct ShardOptions {
  uint32_t index = 0;
  size_t num_stripes = 64;
  bool refuse_non_finite = false;               // NaN and infinities in writes become NON_FINITE
  std::shared_ptr<ValueArena> arena = nullptr;  // where large buffers lie, for clients to read
  std::shared_ptr<Backend> backend = nullptr;   // null: the host's; another one has its own arena
  uint64_t max_memory_bytes = kNoMemoryLimit;   // that the host's may take
  uint64_t max_kept_bytes =
      kNoMemoryLimit;  // for those who read as of a decision, and again for who is told changes
  bool notes_row_decisions = false;  // keeps at which decision rows change, for choose_changed()
};

// A reply of fewer bytes goes over the stream: to copy them there costs less than another frame, which
// says that they were read.
inline constexpr uint64_t kSharedReplyBytes = 64 << 10;

// Of a list of rows, more or less: a frame's share.
inline constexpr uint64_t kListedBytes = 4u << 20;

class Shard {
 public:
  // Throws Error(BAD_ARGUMENT) without stripes.
  explicit Shard(const ShardOptions& options);
  Shard(const Shard&) = delete;
  Shard& operator=(const Shard&) = delete;

  uint32_t index() const { return options_.index; }
  // Where its slots are: "cpu", or a device's name.
  const std::string& device() const { return backend_->device(); }
  const std::shared_ptr<Backend>& backend() const { return backend_; }
  // Takes note of what its device has done by now.
  void flush() { backend_->flush(); }
  // Every few seconds: gives back memory that was needed once and is not any more, at most so much at a time.
  void free_unused(size_t max_bytes) { backend_->free_unused(max_bytes); }

  // ---- schema

  void define(const TensorDefinition& definition);
  void drop(uint64_t tensor_id);

  // ---- writes: check() before the payload is received, then the call for its kind

  // Sets each entry's status to whether it may be written; true: some of them may.
  // Throws Error(BAD_HEADER) if the entries do not add up to `payload_bytes`.
  bool check(WriteKind kind, std::span<SliceEntry> entries, uint64_t payload_bytes);

  // These act on the entries that are OK; `payload` may be empty if none is or all are of zero size.
  // Entries come back as the reply's: status, version, num_bytes 0.

  // Stages contributions. Pushed again before the decision they replace the first; after it they are
  // acknowledged and ignored, unless it is an early one and waits for them. Entries of an older life of
  // the rank become STALE_INCARNATION; those that would replace what a held slot counts on,
  // ROUND_OUT_OF_ORDER. `repeats`: another shard with the same table has taken them; what waits there of an older life
  // waits here, too.
  void stage(const Origin& origin, std::span<SliceEntry> entries, const BufferRef& payload,
             bool repeats = false);
  // What that origin has staged stays as it is from now on: pushed again it is acknowledged and ignored.
  void seal(const Origin& origin);
  // The sum of squares of all that the origin has staged of these tensors, ranges of ids, added in the order of keys.
  // None: a slice of them lacks it. Waits for the device.
  std::optional<double> staged_squares(const Origin& origin,
                                       std::vector<std::pair<uint64_t, uint64_t>> tensors);
  // Sets values where there are none; elsewhere the entry is acknowledged and ignored.
  void initialise(std::span<SliceEntry> entries, const BufferRef& payload);
  // ASSIGN, ADD or RESTORE, once per (client, sequence); call it even if no entry is OK, the sequence
  // counts. One that comes again changes nothing, and has the statuses that it had first. A RESTORE of a slot that is
  // held, or an ASSIGN of its rows, answers NOT_APPLIED and leaves it as it is. An ASSIGN or ADD that there is no memory
  // for beside what readers hold throws Error(OUT_OF_MEMORY), with no slice changed and its sequence unused, unless
  // another thread begins to read meanwhile.
  // Throws Error(UNEXPECTED_MESSAGE) if the client's writes before it are missing, and Error(OVERLOADED) if it came before,
  // and how it was answered is not known any more.
  void write(WriteKind kind, const std::string& client, uint64_t sequence,
             std::span<SliceEntry> entries, const BufferRef& payload);
  // Uses the number of such a write, which has failed as a whole: those behind it may be on their way. What may be written
  // of it has that status now. False: it came before, and has the statuses that it had first. Throws as write() does.
  bool refuse_write(const std::string& client, uint64_t sequence, std::span<SliceEntry> entries,
                    ErrorCode status);
  uint64_t last_sequence(const std::string& client) { return window_.last_sequence(client); }

  // ---- decisions

  uint64_t version() const { return table_.version(); }
  void set_version(uint64_t version);
  // A contribution that it names and that is not here counts as absent: who said that it is was not telling the truth.
  void advance(const Decision& decision);
  // The last contribution that a decision named in vain, of each rank's latest life.
  std::vector<Origin> missing() const { return ranks_.missing(); }
  // The scale that the decision waits for; without a factor it becomes a skip. Ignored if the decision is
  // not the last one, needs none or has one. Throws Error(BAD_ARGUMENT) for a factor that is not finite.
  void set_scale(uint64_t number, std::optional<double> factor);
  // True: there is nothing more to do until something else happens.
  bool settle(int64_t max_slots, int64_t max_bytes = -1);

  // ---- reads

  struct Reply {
    std::vector<Piece> pieces;
    uint64_t payload_bytes = 0;
    uint64_t version = 0;    // of the shard, when it was read: all of it as of that decision
    bool restored = false;   // values of trained slices were, since that decision
    bool shared = false;     // the entries say where in shared memory their bytes lie
    device::FenceRef ready;  // null: now; else the pieces are what they say once it is done
    std::vector<Key> based;  // slices of which that worker has another base now
  };
  struct ReadOptions {
    bool share = false;               // the client can see shared memory
    bool whole = false;               // deltas were read, and do not say_changes()
    std::optional<uint64_t> at = {};  // as of that decision, which is held, and which the shard has
    std::optional<Life> worker = {};  // who is sent the values: they become its bases
  };
  // Values that are shared stay there as they are while the pieces are held.
  // An entry that asks for an encoding may get float32: its dtype says what came (table/published.h). Where there is
  // something to wait for, whoever looks at a delta then, and finds that it does not say its change, reads again.
  // Of one that asks for changes, too, the dtype says whether they came or the whole (table/change_log.h).
  // Throws Error(FRAME_TOO_LARGE) if the values are more than `max_payload_bytes` together.
  Reply read(std::span<SliceEntry> entries, uint64_t max_payload_bytes, ReadOptions options);
  Reply read(std::span<SliceEntry> entries, uint64_t max_payload_bytes) {
    return read(entries, max_payload_bytes, {});
  }

  // Rows that are read, in the order of the entries: `version` of an entry says how many of the ids are its.
  struct WantedRows {
    std::span<const uint64_t> ids;
    // Of the entries that ask for changes: what the reader has of their ids, one after the other, and for each entry the
    // number of the marks that this is of.
    std::span<const uint32_t> changes = {};
    std::span<const uint64_t> marks = {};
  };
  // Values of rows of partitions, one after the other in the order of the ids; of entries that ask for changes those that may
  // have changed, behind what says which (rows/changed_rows.h). First values where there is no row, of which none is made.
  // Statuses and everything else as of read().
  Reply read_rows(std::span<SliceEntry> entries, WantedRows wanted, uint64_t max_payload_bytes,
                  ReadOptions options);

  // Rows of partitions one after the other, in an order that stays while a decision is held: from the number on that an
  // entry's `version` says, of its part 0 the ids, of part 1 the whole records (rows/row_store.h). An entry's
  // num_bytes says how much of them came, of all entries at most kListedBytes, and `version` how many rows there are.
  Reply list_rows(std::span<SliceEntry> entries, ReadOptions options);

  // Holds decisions, from the one that the shard is at on, for a reader that chose that id: values, and rule state if
  // `state`. Returns which one that is.
  uint64_t hold(uint64_t id, bool state);
  // The reader wants that one, and no other. False: it is not held, or no longer.
  bool settle_hold(uint64_t id, uint64_t at);
  void release_hold(uint64_t id);
  // Nobody asks for changes any more: lets go of what is kept for that.
  void forget_changes();

  // All slots, by key, as of a decision that a reader holds with rule state: what is written to a checkpoint. Takes the step of
  // those that have not. Throws what DenseTable::image() throws.
  std::optional<TableImage> image(uint64_t reader, uint64_t at);
  // From here on the image has of a partition of a table the rows alone that may have changed since that decision: all of
  // them, if the shard was not told to note it. How many that are. Throws Error(VERSION_GONE).
  uint64_t choose_changed(TableImage& image, Key key, uint64_t since);
  // Bytes of slots of the image: (key, part), one after the other, which it says are there. Where rows were chosen, the ids of
  // all rows, and then the records of those; all in the order of their places. Throws Error(VERSION_GONE).
  Gathered read(const TableImage& image, std::span<const std::pair<Key, uint16_t>> wanted);
  // Memory of the host for what is written, or to load into. What is kept for readers alone makes room for it.
  BufferRef allocate(size_t num_bytes);
  // DenseTable::load().
  void load(const SlotImage& image, std::span<const BufferRef> parts);

  // It does what another process has done, and goes on in its place: who reads here may have read there.
  void goes_on_for_another() { goes_on_ = true; }
  // Carries the last decision out on all slots that can take its step. Whether that is all.
  bool is_settled();
  // All slots as they are and with what waits in them, for a standby; none if some are not settled.
  std::optional<std::vector<SlotCopy>> copies();
  // From now on nothing that waits lies in memory that somebody shares, as far as there is memory for a copy.
  void own_staged();
  // Gives a slot what its copy was, whose parts follow each other in `payload` from there on. Returns how many bytes they
  // are. Throws what DenseTable::load() throws, and Error(BAD_BODY) if the payload is too short.
  uint64_t take_copy(const SlotImage& image, std::optional<double> squares,
                     const BufferRef& payload, uint64_t offset);
  // That life of a worker was sent the values of these slices as they are.
  void note_bases(const Life& life, std::span<const SliceEntry> entries);
  // A base of it that lies in `payload` from there on, or else is the value. Returns how many bytes it is. Throws what
  // DenseTable::load_base() throws, and Error(BAD_BODY).
  uint64_t take_base(const Life& life, Key key, const BufferRef& payload,
                     std::optional<uint64_t> offset);
  // What it knows beside its slots.
  struct History {
    std::unordered_map<uint32_t, RankBook::Life> lives;     // by rank
    std::vector<std::pair<std::string, uint64_t>> writers;  // and their last sequence numbers
    std::vector<std::pair<uint64_t, uint64_t>> dropped;     // ranges of tensor ids
    bool restored = false;                                  // Reply::restored
  };
  History history();
  // Goes on from there, where `last` was the last decision. REQUIRES: nothing has happened here yet but set_version().
  void resume(History history, const std::optional<Decision>& last);
  // What was refused of the writers' writes; apart, for it may be much.
  std::vector<std::pair<std::string, Refusals>> refusals();
  // After resume(). Throws Error(BAD_BODY) if it can't be that writer's.
  void resume_refusals(const std::string& writer, Refusals refusals);

  // Sums of squares of the gradients that the last decision reduces to, before any scale: one of each
  // entry that is OK afterwards, as float64. NOT_MODIFIED if it needs no scale or does not concern the slice.
  Reply norms(std::span<SliceEntry> entries);

  // Raw bytes of value, rule state and step by name. Waits for the device. Throws Error(UNKNOWN_KEY).
  std::vector<std::pair<std::string, std::string>> state(Key key);
  std::map<std::string, uint64_t> stats();
  // Of each table, by tensor id: what stats() says of rows for all of them.
  std::map<uint64_t, std::map<std::string, uint64_t>> row_stats();

 private:
  // What a payload is, who sent it (pushes only) and where it lies.
  struct Incoming {
    WriteKind kind;
    Origin origin;
    Standing standing;  // of the origin
    const BufferRef& payload;
  };

  // The memory that slices need beside values that somebody reads: all of it, or none and Error(OUT_OF_MEMORY).
  void make_room(const Incoming& incoming, std::span<const SliceEntry> entries)
      REQUIRES_SHARED(table_.decision_mutex);
  // Throws if the first slice can't be accepted, with nothing changed; else each slice says what became of it.
  void accept(const Incoming& incoming, std::span<SliceEntry> entries)
      REQUIRES_SHARED(table_.decision_mutex);
  // Whether the bytes may be used. Looks at all of them, and holds no slot's lock while it does.
  ErrorCode check_content(const SliceEntry& entry, const std::byte* bytes)
      REQUIRES_SHARED(table_.decision_mutex);
  ErrorCode check_encoded(const SliceEntry& entry, const std::byte* bytes)
      REQUIRES_SHARED(table_.decision_mutex);
  ErrorCode check_rows(const SliceEntry& entry, const std::byte* bytes)
      REQUIRES_SHARED(table_.decision_mutex);
  ErrorCode accept_slice(const Incoming& incoming, SliceEntry& entry, size_t offset,
                         BufferRef& resident) REQUIRES_SHARED(table_.decision_mutex);
  ErrorCode change(const Incoming& incoming, const SliceEntry& entry, Stripe& stripe, Slot& slot,
                   const PayloadSlice& slice) REQUIRES_SHARED(table_.decision_mutex)
      REQUIRES(stripe.mutex);
  ErrorCode contribute(const Incoming& incoming, Stripe& stripe, Slot& slot,
                       const PayloadSlice& slice) REQUIRES_SHARED(table_.decision_mutex)
      REQUIRES(stripe.mutex);
  ErrorCode restore(const SliceEntry& entry, Slot& slot, const PayloadSlice& slice)
      REQUIRES_SHARED(table_.decision_mutex);
  ErrorCode assign_rows(Slot& slot, const PayloadSlice& slice)
      REQUIRES_SHARED(table_.decision_mutex);
  // The answer to a write that came before: what was refused of it then, and of the rest what acknowledge() says.
  void answer_again(const Refusals& refusals, uint64_t sequence, std::span<SliceEntry> entries)
      REQUIRES_SHARED(table_.decision_mutex);
  // The answer to what was done before: OK and today's version.
  void acknowledge(std::span<SliceEntry> entries) REQUIRES_SHARED(table_.decision_mutex);
  void refuse(std::span<SliceEntry> entries, ErrorCode status);
  // Whether it is worth it, and nobody has to look at the bytes before they are read.
  bool may_share(std::span<const SliceEntry> entries, uint64_t payload_bytes) const;
  // Notes where in shared memory the entries' bytes lie; false, with no entry changed: some lie elsewhere.
  bool locate(std::span<SliceEntry> entries, std::span<const Piece> pieces) const;
  ErrorCode find(SliceEntry& entry, const ReadOptions& options, std::vector<Finding>& findings,
                 Reply& reply) REQUIRES_SHARED(table_.decision_mutex);
  // The worker is about to be sent the slot's value. OUT_OF_MEMORY: it can't be kept as its base.
  ErrorCode note_base(const Life& worker, Slot& slot, Reply& reply)
      REQUIRES_SHARED(table_.decision_mutex);
  // Of a part that is there, what is sent of it.
  void add_finding(SliceEntry& entry, uint64_t wanted_version, Slot& slot, Part part,
                   std::vector<Finding>& findings) REQUIRES_SHARED(table_.decision_mutex);
  // As of a decision: a slot that no decision changes is as it is.
  ErrorCode find_at(SliceEntry& entry, uint64_t at, Stripe& stripe, Slot& slot,
                    std::vector<Finding>& findings) REQUIRES_SHARED(table_.decision_mutex)
      REQUIRES(stripe.mutex);
  // The records of a partition for an image, or of those that were chosen.
  std::optional<Part> records_at(Stripe& stripe, Slot& slot, const TableImage& image, bool& waits)
      REQUIRES_SHARED(table_.decision_mutex) REQUIRES(stripe.mutex);
  // Writes the rows that the entry asks for, or of those that the reader keeps what has changed.
  ErrorCode write_rows(SliceEntry& entry, std::span<const uint64_t> ids, const KeptRows& kept,
                       const ReadOptions& options, std::byte* to)
      REQUIRES_SHARED(table_.decision_mutex);
  // Copies rows that the entry asks for, `most_bytes` at most.
  ErrorCode copy_rows(SliceEntry& entry, const ReadOptions& options, uint64_t most_bytes,
                      Piece& piece) REQUIRES_SHARED(table_.decision_mutex);
  // Throws Error(FRAME_TOO_LARGE).
  static void check_reply_bytes(uint64_t num_bytes, uint64_t max_bytes);
  ErrorCode find_squares(SliceEntry& entry, std::vector<Sum>& sums)
      REQUIRES_SHARED(table_.decision_mutex);

  static constexpr uint64_t kNever = UINT64_MAX;

  const ShardOptions options_;
  const std::shared_ptr<Backend> backend_;
  Counters counters_;
  std::atomic<uint64_t> restored_at_ = kNever;  // the version at which a value was, the last time
  std::atomic<bool> goes_on_ = false;
  RankBook ranks_;
  WriteWindow window_;
  const std::shared_ptr<MemoryBudget> changes_budget_;
  DenseTable table_;
};

}  // namespace psstore
