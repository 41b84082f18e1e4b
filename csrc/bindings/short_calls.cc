// Habit and ShortCalls for Python. The methods of ShortCalls take what those of a store take, and read it
// themselves.
#include "bindings/short_calls.h"

#include <cstddef>
#include <span>
#include <utility>

#include "bindings/arguments.h"

namespace psstore::bindings {
namespace {

// ---- what is asked: of one tensor, or of many. Nullopt: more than the short way has -----------------

std::optional<PushAsked> push_of_one(const Arguments& arguments) {
  static const Signature<5> signature({"name", "value", "op", "codec", "loss_scale"}, 2);
  const auto given = signature.read(arguments);
  if (!given) return std::nullopt;
  const auto [name, value, op, codec, loss_scale] = *given;
  if (!codec.is_none()) return std::nullopt;
  return PushAsked{py::make_tuple(name), py::make_tuple(value), op};
}

std::optional<PushAsked> push_of_many(const Arguments& arguments) {
  static const Signature<4> signature({"items", "op", "codec", "loss_scale"}, 1);
  const auto given = signature.read(arguments);
  if (!given) return std::nullopt;
  const auto [items, op, codec, loss_scale] = *given;
  if (!codec.is_none() || !PyDict_CheckExact(items.ptr())) return std::nullopt;
  return PushAsked{stolen<py::tuple>(PySequence_Tuple(items.ptr())),
                   stolen<py::list>(PyDict_Values(items.ptr())), op};
}

std::optional<PullAsked> pull_of_one(const Arguments& arguments) {
  static const Signature<6> signature({"name", "out", "if_newer_than", "dtype", "codec", "wait_s"},
                                      1);
  const auto given = signature.read(arguments);
  if (!given) return std::nullopt;
  const auto [name, out, if_newer_than, dtype, codec, wait_s] = *given;
  if (!codec.is_none()) return std::nullopt;
  PullAsked asked{py::make_tuple(name), std::nullopt, if_newer_than, dtype, wait_s};
  if (!out.is_none()) asked.out = py::make_tuple(out);
  return asked;
}

std::optional<PullAsked> pull_of_many(const Arguments& arguments) {
  static const Signature<6> signature({"names", "out", "if_newer_than", "dtype", "codec", "wait_s"},
                                      1);
  const auto given = signature.read(arguments);
  if (!given) return std::nullopt;
  const auto [names, out, if_newer_than, dtype, codec, wait_s] = *given;
  const bool plain = codec.is_none() && (PyList_Check(names.ptr()) || PyTuple_Check(names.ptr())) &&
                     (out.is_none() || PySequence_Check(out.ptr()));
  if (!plain) return std::nullopt;
  PullAsked asked{stolen<py::tuple>(PySequence_Tuple(names.ptr())), std::nullopt, if_newer_than,
                  dtype, wait_s};
  if (!out.is_none()) asked.out = stolen<py::list>(PySequence_List(out.ptr()));
  return asked;
}

// Nullopt: none that anything can be newer than.
std::optional<uint64_t> version_of(py::handle given) {
  if (!PyLong_Check(given.ptr())) return std::nullopt;
  const unsigned long long version = PyLong_AsUnsignedLongLong(given.ptr());
  if (PyErr_Occurred() == nullptr && version < UINT64_MAX) return version;
  PyErr_Clear();
  return std::nullopt;
}

// ---- the methods: null, if it is not the time for this, or not so -----------------------------------

template <auto asked_of>
py::object push(ShortCalls& calls, const Arguments& arguments) {
  const std::optional<PushAsked> asked = asked_of(arguments);
  return asked && calls.push(*asked) ? py::none() : py::object();
}

template <auto asked_of>
py::object start_push(ShortCalls& calls, const Arguments& arguments) {
  const std::optional<PushAsked> asked = asked_of(arguments);
  return asked ? calls.start_push(*asked) : py::object();
}

// The array, or a sequence of them.
template <auto asked_of>
py::object pull(ShortCalls& calls, const Arguments& arguments) {
  std::optional<PullAsked> asked = asked_of(arguments);
  if (!asked || !calls.pull(*asked)) return {};
  if constexpr (asked_of == pull_of_one) return (*asked->out)[0];
  return std::move(*asked->out);
}

template <auto asked_of>
py::object start_pull(ShortCalls& calls, const Arguments& arguments) {
  std::optional<PullAsked> asked = asked_of(arguments);
  return asked ? calls.start_pull(*asked) : py::object();
}

using Method = py::object (*)(ShortCalls&, const Arguments&);

template <Method method>
PyObject* entry(PyObject* self, PyObject* const* values, Py_ssize_t num_positional,
                PyObject* keywords) {
  try {
    auto& calls = py::handle(self).cast<ShortCalls&>();
    py::object done = method(calls, {values, static_cast<size_t>(num_positional), keywords});
    if (!done) done = py::reinterpret_borrow<py::object>(Py_NotImplemented);
    return done.release().ptr();
  } catch (...) {
    raise_in_python(std::current_exception());
    return nullptr;
  }
}

template <Method method>
PyMethodDef definition(const char* name, const char* doc) {
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&entry<method>)),
          METH_FASTCALL | METH_KEYWORDS, doc};
}

void add_method(py::handle cls, PyMethodDef& method) {
  auto* const type = reinterpret_cast<PyTypeObject*>(cls.ptr());
  cls.attr(method.ml_name) = py::reinterpret_steal<py::object>(PyDescr_NewMethod(type, &method));
}

}  // namespace

// ---- what they do -----------------------------------------------------------------------------------

ShortCalls::ShortCalls(ShortCallParts parts)
    : parts_(std::move(parts)),
      lane_(parts_.lane_object.cast<FastLane&>()),
      sender_(parts_.sender_object.cast<const Sender&>()) {}

bool ShortCalls::push(const PushAsked& asked) {
  const std::optional<Habit> known = habit_of(asked);
  if (!known || !carry_out(*known, asked.values, Py_None, Py_None)) return false;
  parts_.sent(known->op, known->layout);
  return true;
}

bool ShortCalls::pull(PullAsked& asked) {
  const std::optional<Habit> known = habit_of(asked);
  if (!known) return false;
  if (!asked.out) asked.out = known->layout.attr("fresh")();
  const std::optional<py::list> answers =
      carry_out(*known, *asked.out, asked.wait_s, asked.if_newer_than);
  if (!answers) return false;
  if (asked.if_newer_than.is_none()) {
    parts_.received(known->layout, *answers);
  } else {
    asked.out = parts_.newer(known->layout, *answers, *asked.out);
  }
  return true;
}

py::object ShortCalls::start_push(const PushAsked& asked) {
  const std::optional<Habit> known = habit_of(asked);
  return known ? start(*known, asked.values, Py_None, py::none()) : py::object();
}

py::object ShortCalls::start_pull(PullAsked& asked) {
  const std::optional<Habit> known = habit_of(asked);
  if (!known || !asked.if_newer_than.is_none()) return {};
  if (!asked.out) asked.out = known->layout.attr("fresh")();
  return start(*known, *asked.out, asked.wait_s, *asked.out);
}

std::optional<Habit> ShortCalls::habit_of(const PushAsked& asked) const {
  static PyObject* const what = interned("push");
  return habit(py::make_tuple(py::handle(what), asked.names, asked.op));
}

std::optional<Habit> ShortCalls::habit_of(const PullAsked& asked) const {
  static PyObject* const what = interned("pull");
  return habit(py::make_tuple(py::handle(what), asked.names, asked.dtype, py::bool_(!asked.out)));
}

// What cannot be looked up, such as a name that is a list, is for others to complain of.
std::optional<Habit> ShortCalls::habit(const py::tuple& manner) const {
  PyObject* const found = PyDict_GetItemWithError(py::object(parts_.habits[0]).ptr(), manner.ptr());
  if (found != nullptr) return py::handle(found).cast<const Habit&>();
  PyErr_Clear();
  return std::nullopt;
}

// A time that is named for this call makes terms of its own.
py::object ShortCalls::terms_of(const Habit& habit, py::handle wait_s) const {
  if (wait_s.is_none()) {
    PyObject* const known =
        PyDict_GetItemWithError(py::object(parts_.terms[0]).ptr(), habit.op.ptr());
    if (known != nullptr) return py::reinterpret_borrow<py::object>(known);
  }
  return parts_.renew(habit.op, habit.layout, wait_s);
}

std::optional<py::list> ShortCalls::carry_out(const Habit& habit, const py::sequence& arrays,
                                              py::handle wait_s, py::handle if_newer_than) {
  std::optional<uint64_t> newer_than;
  if (!if_newer_than.is_none()) {
    newer_than = version_of(if_newer_than);
    if (!newer_than) return std::nullopt;
  }
  std::optional<std::vector<Segments>> memories =
      habit.plan->map().of_arrays(arrays, /*writable=*/habit.reads);
  if (!memories) return std::nullopt;
  while (futures_.size() < habit.plan->num_frames()) futures_.append(parts_.future());
  const py::object terms = terms_of(habit, wait_s);
  if (terms.is_none()) return std::nullopt;
  Attempt attempt(*habit.plan, std::move(*memories), sender_, terms.cast<const Terms&>(),
                  newer_than);
  py::list answers;
  switch (lane_.call(attempt, futures_, answers)) {
    case FastLane::Outcome::kNotNow: return std::nullopt;
    case FastLane::Outcome::kLeft: return py::list(parts_.conclude(habit.layout, answers));
    case FastLane::Outcome::kAnswered: break;
  }
  if (attempt.owes_releases()) parts_.starting->look_after(habit.layout);
  if (!attempt.succeeded()) return py::list(parts_.conclude(habit.layout, attempt.answers()));
  return habit.reads ? attempt.answers() : answers;
}

py::object ShortCalls::start(const Habit& habit, const py::sequence& arrays, py::handle wait_s,
                             py::object results) {
  const StartingParts& starting = *parts_.starting;
  if (habit.plan->num_frames() == 0 || starting.paced().ptr() == Py_True) return {};
  std::optional<std::vector<Segments>> memories =
      habit.plan->map().of_arrays(arrays, /*writable=*/habit.reads);
  if (!memories) return {};
  if (lane_.has_ready()) starting.catch_up();
  py::object terms = terms_of(habit, wait_s);
  if (terms.is_none()) return {};
  const auto call =
      std::make_shared<StartedCall>(parts_.starting, habit, std::move(*memories),
                                    parts_.sender_object, std::move(terms), std::move(results));
  const std::optional<bool> all_done = lane_.start(*call);
  if (!all_done) return {};
  if (!*all_done) starting.look_after(habit.layout);
  return call->whole();
}

void bind_short_calls(py::module_& m) {
  using namespace py::literals;
  py::class_<StartingParts, std::shared_ptr<StartingParts>>(m, "StartingParts", py::is_final())
      .def(py::init([](py::object make, py::object ended, py::object unfinished,
                       py::object look_after, py::object catch_up, py::object paced,
                       py::set under_way) {
             return StartingParts{std::move(make),       std::move(ended),    std::move(unfinished),
                                  std::move(look_after), std::move(catch_up), std::move(paced),
                                  std::move(under_way)};
           }),
           py::kw_only(), "make"_a, "ended"_a, "unfinished"_a, "look_after"_a, "catch_up"_a,
           "paced"_a, "under_way"_a);
  py::class_<Habit>(m, "Habit", py::is_final())
      .def(py::init([](const py::str& op, py::object layout, py::object plan) {
             const auto& frames = plan.cast<const FramePlan&>();
             PyObject* name = op.inc_ref().ptr();
             PyUnicode_InternInPlace(&name);
             auto interned_op = py::reinterpret_steal<py::str>(name);
             const bool reads = interned_op.equal(py::str("PULL"));
             return Habit{std::move(interned_op), std::move(layout), std::move(plan), &frames,
                          reads};
           }),
           "op"_a, "layout"_a, "plan"_a)
      .def_property_readonly("op", [](const Habit& self) { return self.op; })
      .def_property_readonly("layout", [](const Habit& self) { return self.layout; });

  static PyMethodDef methods[] = {
      definition<&push<push_of_one>>("push",
                                     "push(self, *args: object, **kwargs: object) -> object"),
      definition<&push<push_of_many>>("push_many",
                                      "push_many(self, *args: object, **kwargs: object) -> object"),
      definition<&start_push<push_of_many>>(
          "start_push_many", "start_push_many(self, *args: object, **kwargs: object) -> object"),
      definition<&start_pull<pull_of_many>>(
          "start_pull_many", "start_pull_many(self, *args: object, **kwargs: object) -> object"),
      definition<&pull<pull_of_one>>("pull",
                                     "pull(self, *args: object, **kwargs: object) -> object"),
      definition<&pull<pull_of_many>>("pull_many",
                                      "pull_many(self, *args: object, **kwargs: object) -> object"),
  };
  py::class_<ShortCalls> calls(m, "ShortCalls", py::is_final());
  calls.def(
      py::init([](py::object lane, py::object sender, py::sequence habits, py::list terms,
                  py::object renew, py::object future, py::object sent, py::object received,
                  py::object newer, py::object conclude, std::shared_ptr<StartingParts> starting) {
        return ShortCalls({std::move(lane), std::move(sender), std::move(habits), std::move(terms),
                           std::move(renew), std::move(future), std::move(sent),
                           std::move(received), std::move(newer), std::move(conclude),
                           std::move(starting)});
      }),
      "lane"_a, "sender"_a, py::kw_only(), "habits"_a, "terms"_a, "renew"_a, "future"_a, "sent"_a,
      "received"_a, "newer"_a, "conclude"_a, "starting"_a);
  for (PyMethodDef& method : methods) add_method(calls, method);
}

}  // namespace psstore::bindings
