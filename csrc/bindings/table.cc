// Decision and Shard for Python.
//
// Every call that does work lets go of the GIL. Frames belong to one connection and are handled by one
// thread at a time (wire/frame.h), so reading them without the GIL is safe.
#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "bindings/memory.h"
#include "server/frame_calls.h"
#include "shm/push_arena.h"
#include "table/device_backend.h"
#include "table/host_backend.h"
#include "table/published.h"
#include "table/reservation.h"

namespace psstore::bindings {
namespace {

using MemberTuple = std::tuple<uint32_t, uint32_t, uint64_t, double>;
using PresentTensors = std::map<uint32_t, std::vector<std::pair<uint64_t, uint64_t>>>;

// ---- Decision -------------------------------------------------------------------------------------

Decision make_decision(uint64_t number, bool skip, double divisor,
                       const std::vector<MemberTuple>& members, GroupHypers hypers,
                       PresentTensors present, bool early, bool needs_scale, bool averages,
                       const std::vector<double>& loss_scales) {
  if (early && needs_scale) {
    throw Error(ErrorCode::BAD_ARGUMENT,
                "decision " + std::to_string(number) +
                    " is early and needs a scale; a norm can't be had before the contributions");
  }
  const Open open = early ? Open::kContributions : needs_scale ? Open::kScale : Open::kNothing;
  std::vector<Member> made;
  made.reserve(members.size());
  for (const auto& [rank, incarnation, round, weight] : members) {
    made.push_back({{rank, incarnation, round}, static_cast<float>(weight), {}});
    const auto pushed = present.find(rank);
    if (pushed == present.end()) continue;
    made.back().present = std::move(pushed->second);
    present.erase(pushed);
  }
  if (!present.empty()) {
    throw Error(ErrorCode::BAD_ARGUMENT, "decision " + std::to_string(number) + ": rank " +
                                             std::to_string(present.begin()->first) +
                                             " has gradients, but is not a member");
  }
  if (!loss_scales.empty() && loss_scales.size() != made.size()) {
    throw Error(ErrorCode::BAD_ARGUMENT,
                "decision " + std::to_string(number) + ": " + std::to_string(loss_scales.size()) +
                    " loss scales of " + std::to_string(made.size()) + " members");
  }
  for (size_t i = 0; i < loss_scales.size(); ++i) {
    made[i].loss_scale = static_cast<float>(loss_scales[i]);
  }
  return Decision(number, skip, divisor, std::move(made), std::move(hypers), open, averages);
}

void expect(bool fits, const Frame& frame, const char* expected) {
  if (!fits) {
    throw Error(ErrorCode::BAD_ARGUMENT, "expected " + std::string(expected) + ", got operation " +
                                             std::to_string(static_cast<int>(frame.header.op)));
  }
  if (!frame.complete) {
    throw Error(ErrorCode::BAD_ARGUMENT, "the payload of this frame has not arrived yet");
  }
}

// ---- Shard ----------------------------------------------------------------------------------------

std::unique_ptr<Shard> make_shard(uint32_t index, size_t num_stripes, bool refuse_non_finite,
                                  std::shared_ptr<ValueArena> arena, const std::string& device,
                                  size_t num_sharing, uint64_t max_memory_bytes,
                                  uint64_t max_kept_bytes, bool notes_row_decisions) {
  if (device == "cpu") {
    return std::make_unique<Shard>(ShardOptions{.index = index,
                                                .num_stripes = num_stripes,
                                                .refuse_non_finite = refuse_non_finite,
                                                .arena = std::move(arena),
                                                .max_memory_bytes = max_memory_bytes,
                                                .max_kept_bytes = max_kept_bytes,
                                                .notes_row_decisions = notes_row_decisions});
  }
  if (arena != nullptr || num_sharing == 0) {
    throw Error(ErrorCode::BAD_ARGUMENT, "a shard on device '" + device +
                                             "' takes no arena, and is one of at least 1 there");
  }
  auto backend = std::make_shared<DeviceBackend>(device::open_device(device), num_sharing,
                                                 host_budget(max_memory_bytes));
  return std::make_unique<Shard>(ShardOptions{.index = index,
                                              .num_stripes = num_stripes,
                                              .refuse_non_finite = refuse_non_finite,
                                              .backend = std::move(backend),
                                              .max_kept_bytes = max_kept_bytes});
}

// (most rows of a partition, eviction, time to live, admission, contributions before it, its probability)
using BoundsTuple = std::tuple<uint64_t, uint8_t, uint32_t, uint8_t, uint32_t, double>;
// (dim, kind of first values, their a and b, seed, bounds)
using RowsTuple = std::tuple<uint32_t, uint8_t, double, double, uint64_t, BoundsTuple>;

RowsSpec rows_spec(const std::optional<RowsTuple>& rows) {
  if (!rows) return {};
  const auto& [dim, kind, a, b, seed, bounds] = *rows;
  const auto& [max_rows, eviction, time_to_live, admission, admit_after, probability] = bounds;
  return {dim,
          {static_cast<FirstValueKind>(kind), a, b, seed},
          {.max_rows = max_rows,
           .eviction = static_cast<EvictionKind>(eviction),
           .time_to_live = time_to_live,
           .admission = static_cast<AdmissionKind>(admission),
           .admit_after = admit_after,
           .admit_probability = probability}};
}

void define(Shard& shard, uint64_t tensor_id, uint8_t dtype, uint8_t rule, uint32_t group,
            bool zeros, const std::vector<std::pair<Key, uint64_t>>& slices,
            const std::optional<RowsTuple>& rows, const std::pair<uint8_t, uint32_t>& reduction,
            double compensation) {
  const py::gil_scoped_release no_gil;
  TensorDefinition definition{
      .tensor_id = tensor_id,
      .dtype = static_cast<DType>(dtype),
      .rule = static_cast<RuleKind>(rule),
      .group = group,
      .zeros = zeros,
      .slices = {},
      .rows = rows_spec(rows),
      .reduction = {static_cast<ReductionKind>(reduction.first), reduction.second},
      .compensation = compensation};
  for (const auto& [key, num_elems] : slices) definition.slices.push_back({key, num_elems});
  shard.define(definition);
}

py::object admit_frame(Shard& shard, Frame& frame) {
  BufferRef payload;
  {
    const py::gil_scoped_release no_gil;
    payload = admit(shard, frame);
  }
  if (!payload) return py::none();
  return wrap_buffer(std::move(payload), true);
}

SliceTable write_frame(Shard& shard, const Frame& frame, const std::string& client) {
  const py::gil_scoped_release no_gil;
  return write(shard, frame, client);
}

SliceTable stage(Shard& shard, const Frame& frame) {
  expect(frame.header.op == Op::kPUSH, frame, "PUSH");
  return write_frame(shard, frame, "");
}

SliceTable initialise(Shard& shard, const Frame& frame) {
  expect(frame.header.op == Op::kINIT, frame, "INIT");
  return write_frame(shard, frame, "");
}

SliceTable write_once(Shard& shard, const Frame& frame, const std::string& client) {
  const WriteKind kind = write_kind(frame);
  expect(kind == WriteKind::kAssign || kind == WriteKind::kAdd, frame, "ASSIGN or ADD");
  return write_frame(shard, frame, client);
}

SliceTable restore(Shard& shard, const Frame& frame, const std::string& client) {
  expect(frame.header.op == Op::kRESTORE, frame, "RESTORE");
  return write_frame(shard, frame, client);
}

py::list views_of(std::vector<Piece>& pieces) {
  py::list views;
  for (Piece& piece : pieces) views.append(view_of(std::move(piece)));
  return views;
}

py::tuple read_frame(Shard& shard, const Frame& frame, bool share, bool whole) {
  expect(frame.header.op == Op::kPULL, frame, "PULL");
  ReadReply reply;
  {
    const py::gil_scoped_release no_gil;
    reply = read(shard, frame, {.share = share, .whole = whole});
  }
  return py::make_tuple(std::move(reply.table), views_of(reply.values.pieces), reply.values.shared,
                        std::move(reply.values.ready));
}

bool changes_are_said(const SliceTable& table, py::handle payload) {
  const PyBytesRange bytes(payload);
  if (table.payload_bytes() != bytes.size()) {
    throw Error(ErrorCode::BAD_ARGUMENT, "a payload of " + std::to_string(bytes.size()) +
                                             " bytes is not that of the table, which has " +
                                             std::to_string(table.payload_bytes()));
  }
  return say_changes(table.entries(), bytes.bytes());
}

py::tuple norms(Shard& shard, const Frame& frame) {
  expect(frame.header.op == Op::kNORM, frame, "NORM");
  std::vector<SliceEntry> entries = entries_of(frame);
  Shard::Reply reply;
  {
    const py::gil_scoped_release no_gil;
    reply = shard.norms(entries);
  }
  return py::make_tuple(SliceTable(std::move(entries)), views_of(reply.pieces),
                        std::move(reply.ready));
}

// ---- what a shard on a device shares of it

DeviceBackend& on_device(const Shard& shard) {
  auto* const backend = dynamic_cast<DeviceBackend*>(shard.backend().get());
  if (backend == nullptr) throw Error(ErrorCode::BAD_ARGUMENT, "this shard is on no device");
  return *backend;
}

std::vector<std::shared_ptr<device::SharedBlock>> shared_blocks(const Shard& shard,
                                                                uint64_t after) {
  if (shard.device() == "cpu") return {};
  return on_device(shard).blocks_after(after);
}

// (arena, where it begins)
std::pair<std::shared_ptr<PushArena>, uint64_t> make_push_arena(const Shard& shard,
                                                                size_t num_bytes) {
  DeviceBackend& backend = on_device(shard);
  const size_t num_blocks = (num_bytes + kPushBlockBytes - 1) / kPushBlockBytes;
  const size_t whole_bytes = num_blocks * kPushBlockBytes;
  auto reservation = std::make_shared<Reservation>(shard.backend(), whole_bytes);
  BufferRef memory = backend.allocate(whole_bytes);
  const std::optional<uint64_t> address = backend.offset_of(memory->data());
  return {PushArena::create_over(std::move(memory), *address, std::move(reservation)), *address};
}

py::dict state(Shard& shard, Key key) {
  std::vector<std::pair<std::string, std::string>> named;
  {
    const py::gil_scoped_release no_gil;
    named = shard.state(key);
  }
  py::dict result;
  for (const auto& [name, bytes] : named) result[py::str(name)] = py::bytes(bytes);
  return result;
}

// ---- what is written elsewhere, and read back

static_assert(sizeof(SlotImage) == 4 * sizeof(uint64_t));

py::bytes slots_of(const TableImage& image) {
  return {reinterpret_cast<const char*>(image.slots.data()),
          image.slots.size() * sizeof(SlotImage)};
}

// Waits for a device that the slots are on.
py::list read_image(Shard& shard, const TableImage& image,
                    const std::vector<std::pair<Key, uint16_t>>& wanted) {
  Gathered gathered;
  {
    const py::gil_scoped_release no_gil;
    gathered = shard.read(image, wanted);
    if (gathered.ready) gathered.ready->wait();
  }
  return views_of(gathered.pieces);
}

// `num_rows`: of a partition of a table, whose records are the part.
void load(Shard& shard, Key key, uint64_t version, uint64_t num_steps, const py::sequence& parts,
          uint64_t num_rows) {
  std::vector<BufferRef> buffers;
  for (const py::handle part : parts) {
    buffers.push_back(part.is_none() ? BufferRef() : part.cast<const PyBuffer&>().ref());
  }
  const py::gil_scoped_release no_gil;
  shard.load({key, version, num_steps, SlotImage::parts_of_rows(num_rows)}, buffers);
}

// (rank, incarnation, decided round or -1, whether it was promised, missing round or -1, sealed round or -1)
using LifeTuple = std::tuple<uint32_t, uint32_t, int64_t, bool, int64_t, int64_t>;
// (lives, writers and their last numbers, ranges of dropped ids, whether values were restored since the last decision)
using HistoryTuple =
    std::tuple<std::vector<LifeTuple>, std::vector<std::pair<std::string, uint64_t>>,
               std::vector<std::pair<uint64_t, uint64_t>>, bool>;

int64_t or_none(const std::optional<uint64_t>& round) {
  return round ? static_cast<int64_t>(*round) : -1;
}

std::optional<uint64_t> if_any(int64_t round) {
  return round < 0 ? std::nullopt : std::optional(static_cast<uint64_t>(round));
}

HistoryTuple history(Shard& shard) {
  Shard::History found = shard.history();
  std::vector<LifeTuple> lives;
  for (const auto& [rank, life] : found.lives) {
    lives.emplace_back(rank, life.incarnation, or_none(life.decided_round), life.promised,
                       or_none(life.missing_round), or_none(life.sealed_round));
  }
  return {std::move(lives), std::move(found.writers), std::move(found.dropped), found.restored};
}

void resume(Shard& shard, const HistoryTuple& known, const Decision* last) {
  const auto& [lives, writers, dropped, restored] = known;
  Shard::History history{{}, writers, dropped, restored};
  for (const auto& [rank, incarnation, decided, promised, missing, sealed] : lives) {
    history.lives[rank] = {incarnation, if_any(decided), promised, if_any(missing), if_any(sealed)};
  }
  shard.resume(std::move(history), last != nullptr ? std::optional(*last) : std::nullopt);
}

// (sequence, begin, end, code) of refused slices of a write
using RefusedTuple = std::tuple<uint64_t, uint32_t, uint32_t, uint8_t>;
// (writer, the last write of which it is not known any more, the slices)
using RefusalsTuple = std::tuple<std::string, uint64_t, std::vector<RefusedTuple>>;

std::vector<RefusalsTuple> refusals(Shard& shard) {
  std::vector<RefusalsTuple> found;
  for (const auto& [writer, of_writer] : shard.refusals()) {
    std::vector<RefusedTuple> runs;
    for (const auto& [sequence, begin, end, status] : of_writer.runs) {
      runs.emplace_back(sequence, begin, end, static_cast<uint8_t>(status));
    }
    found.emplace_back(writer, of_writer.forgotten, std::move(runs));
  }
  return found;
}

void resume_refusals(Shard& shard, const std::string& writer, uint64_t forgotten,
                     const std::vector<RefusedTuple>& runs) {
  Refusals refusals{forgotten, {}};
  for (const auto& [sequence, begin, end, code] : runs) {
    refusals.runs.push_back({sequence, begin, end, ErrorCode{code}});
  }
  shard.resume_refusals(writer, std::move(refusals));
}

}  // namespace

void bind_table(py::module_& m) {
  const py::call_guard<py::gil_scoped_release> no_gil;

  py::classh<TableImage>(m, "TableImage", py::is_final())
      .def_readonly("at", &TableImage::at)
      .def_property_readonly("slots", &slots_of);

  py::classh<Decision>(m, "Decision", py::is_final())
      .def(py::init(&make_decision), py::arg("number"), py::arg("skip"), py::arg("divisor"),
           py::arg("members"), py::arg("hypers"), py::arg("present"), py::arg("early") = false,
           py::arg("needs_scale") = false, py::arg("averages") = true,
           py::arg("loss_scales") = std::vector<double>())
      .def_property_readonly("number", &Decision::number);

  py::classh<Shard>(m, "Shard", py::is_final())
      .def(py::init(&make_shard), py::kw_only(), py::arg("index"), py::arg("num_stripes") = 64,
           py::arg("refuse_non_finite") = false, py::arg("arena") = nullptr,
           py::arg("device") = "cpu", py::arg("num_sharing") = 1,
           py::arg("max_memory_bytes") = kNoMemoryLimit, py::arg("max_kept_bytes") = kNoMemoryLimit,
           py::arg("notes_row_decisions") = false)
      .def_property_readonly("version", &Shard::version)
      .def_property_readonly("device", &Shard::device)
      .def("set_version", &Shard::set_version, py::arg("version"), no_gil)
      .def("define", &define, py::arg("tensor_id"), py::kw_only(), py::arg("dtype"),
           py::arg("rule"), py::arg("group"), py::arg("zeros"), py::arg("slices"),
           py::arg("rows") = py::none(), py::arg("reduction") = std::pair<uint8_t, uint32_t>(0, 0),
           py::arg("compensation") = 0.0)
      .def("drop", &Shard::drop, py::arg("tensor_id"), no_gil)
      .def("admit", &admit_frame, py::arg("frame"))
      .def("stage", &stage, py::arg("frame"))
      .def("initialise", &initialise, py::arg("frame"))
      .def("write", &write_once, py::arg("frame"), py::arg("client"))
      .def("restore", &restore, py::arg("frame"), py::arg("client"))
      .def("last_sequence", &Shard::last_sequence, py::arg("client"), no_gil)
      .def("advance", &Shard::advance, py::arg("decision"), no_gil)
      .def("missing",
           [](const Shard& self) {
             py::list found;
             for (const Origin& origin : self.missing()) {
               found.append(py::make_tuple(origin.rank, origin.incarnation, origin.round));
             }
             return found;
           })
      .def(
          "seal",
          [](Shard& self, uint32_t rank, uint32_t incarnation, uint64_t round) {
            self.seal({rank, incarnation, round});
          },
          py::arg("rank"), py::arg("incarnation"), py::arg("round"), no_gil)
      .def(
          "staged_squares",
          [](Shard& self, uint32_t rank, uint32_t incarnation, uint64_t round,
             std::vector<std::pair<uint64_t, uint64_t>> tensors) {
            return self.staged_squares({rank, incarnation, round}, std::move(tensors));
          },
          py::arg("rank"), py::arg("incarnation"), py::arg("round"), py::kw_only(),
          py::arg("tensors"), no_gil)
      .def("set_scale", &Shard::set_scale, py::arg("number"), py::arg("factor"), no_gil)
      .def("settle", &Shard::settle, py::arg("max_slots") = -1, py::arg("max_bytes") = -1, no_gil)
      .def("read", &read_frame, py::arg("frame"), py::kw_only(), py::arg("share") = false,
           py::arg("whole") = false)
      .def("norms", &norms, py::arg("frame"))
      .def("flush", &Shard::flush, no_gil)
      .def("free_unused", &Shard::free_unused, py::arg("max_bytes"), no_gil)
      .def(
          "work_after",
          [](const Shard& self, const device::FenceRef& fence) {
            on_device(self).work_after(fence);
          },
          py::arg("fence"), no_gil)
      .def(
          "work_so_far", [](const Shard& self) { return on_device(self).work_so_far(); }, no_gil)
      .def_property_readonly(
          "device_identity",
          [](const Shard& self) { return py::bytes(on_device(self).identity()); })
      .def("shared_blocks", &shared_blocks, py::arg("after"), no_gil)
      .def("make_push_arena", &make_push_arena, py::arg("num_bytes"), no_gil)
      .def("image", &Shard::image, py::arg("reader"), py::arg("at"), no_gil)
      .def("choose_changed", &Shard::choose_changed, py::arg("image"), py::arg("key"),
           py::arg("since"), no_gil)
      .def("read_image", &read_image, py::arg("image"), py::arg("wanted"))
      .def(
          "allocate",
          [](Shard& self, size_t num_bytes) { return wrap_buffer(self.allocate(num_bytes), true); },
          py::arg("num_bytes"))
      .def("load", &load, py::arg("key"), py::arg("version"), py::arg("num_steps"),
           py::arg("parts"), py::arg("num_rows") = 0)
      .def("is_settled", &Shard::is_settled, no_gil)
      .def("own_staged", &Shard::own_staged, no_gil)
      .def("history", &history)
      .def("resume", &resume, py::arg("history"), py::arg("last"))
      .def("refusals", &refusals)
      .def("resume_refusals", &resume_refusals, py::arg("writer"), py::arg("forgotten"),
           py::arg("runs"))
      .def("state", &state, py::arg("key"))
      .def("stats", &Shard::stats, no_gil)
      .def("row_stats", &Shard::row_stats, no_gil);
  m.def("say_changes", &changes_are_said, py::arg("table"), py::arg("payload"));
}

}  // namespace psstore::bindings
