// DirectCalls for Python. The methods of DirectCalls take what those of a store take, and read it
// themselves.
#include "bindings/direct_calls.h"

#include <cmath>
#include <cstddef>
#include <span>
#include <utility>

#include "bindings/arguments.h"

namespace psstore::bindings {
namespace {

// ---- what is asked: of one tensor, or of many. Nullopt: more than the short way has -----------------

// Of a push without a codec it changes nothing, but what is none is for others to complain of.
bool is_scale(py::handle given) {
  if (given.is_none()) return true;
  return PyFloat_Check(given.ptr()) && PyFloat_AS_DOUBLE(given.ptr()) > 0.0 &&
         std::isfinite(PyFloat_AS_DOUBLE(given.ptr()));
}

std::optional<PushAsked> push_of_one(const Arguments& arguments) {
  static const Signature<5> signature({"name", "value", "op", "codec", "loss_scale"}, 2);
  const auto given = signature.read(arguments);
  if (!given) return std::nullopt;
  const auto [name, value, op, codec, loss_scale] = *given;
  if (!codec.is_none() || !is_scale(loss_scale)) return std::nullopt;
  return PushAsked{py::make_tuple(name), py::make_tuple(value), op};
}

std::optional<PushAsked> push_of_many(const Arguments& arguments) {
  static const Signature<4> signature({"items", "op", "codec", "loss_scale"}, 1);
  const auto given = signature.read(arguments);
  if (!given) return std::nullopt;
  const auto [items, op, codec, loss_scale] = *given;
  const bool plain = codec.is_none() && is_scale(loss_scale) && PyDict_CheckExact(items.ptr());
  if (!plain) return std::nullopt;
  return PushAsked{stolen<py::tuple>(PySequence_Tuple(items.ptr())),
                   stolen<py::list>(PyDict_Values(items.ptr())), op};
}

std::optional<PullAsked> pull_of_one(const Arguments& arguments) {
  static const Signature<7> signature(
      {"name", "out", "if_newer_than", "dtype", "codec", "wait_s", "consistent"}, 1);
  const auto given = signature.read(arguments);
  if (!given) return std::nullopt;
  const auto [name, out, if_newer_than, dtype, codec, wait_s, consistent] = *given;
  if (!codec.is_none()) return std::nullopt;
  PullAsked asked{py::make_tuple(name), std::nullopt, if_newer_than, dtype, wait_s, consistent};
  if (!out.is_none()) asked.out = py::make_tuple(out);
  return asked;
}

std::optional<PullAsked> pull_of_many(const Arguments& arguments) {
  static const Signature<7> signature(
      {"names", "out", "if_newer_than", "dtype", "codec", "wait_s", "consistent"}, 1);
  const auto given = signature.read(arguments);
  if (!given) return std::nullopt;
  const auto [names, out, if_newer_than, dtype, codec, wait_s, consistent] = *given;
  const bool plain = codec.is_none() && (PyList_Check(names.ptr()) || PyTuple_Check(names.ptr())) &&
                     (out.is_none() || PySequence_Check(out.ptr()));
  if (!plain) return std::nullopt;
  PullAsked asked{stolen<py::tuple>(PySequence_Tuple(names.ptr())),
                  std::nullopt,
                  if_newer_than,
                  dtype,
                  wait_s,
                  consistent};
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
py::object push(DirectCalls& calls, const Arguments& arguments) {
  const std::optional<PushAsked> asked = asked_of(arguments);
  return asked && calls.push(*asked) ? py::none() : py::object();
}

template <auto asked_of>
py::object start_push(DirectCalls& calls, const Arguments& arguments) {
  const std::optional<PushAsked> asked = asked_of(arguments);
  return asked ? calls.start_push(*asked) : py::object();
}

// The array, or a sequence of them.
template <auto asked_of>
py::object pull(DirectCalls& calls, const Arguments& arguments) {
  std::optional<PullAsked> asked = asked_of(arguments);
  if (!asked || !calls.pull(*asked)) return {};
  if constexpr (asked_of == pull_of_one) return (*asked->out)[0];
  return std::move(*asked->out);
}

template <auto asked_of>
py::object start_pull(DirectCalls& calls, const Arguments& arguments) {
  std::optional<PullAsked> asked = asked_of(arguments);
  return asked ? calls.start_pull(*asked) : py::object();
}

using Method = py::object (*)(DirectCalls&, const Arguments&);

template <Method method>
PyObject* entry(PyObject* self, PyObject* const* values, Py_ssize_t num_positional,
                PyObject* keywords) {
  try {
    auto& calls = py::handle(self).cast<DirectCalls&>();
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

DirectCalls::DirectCalls(DirectCallParts parts)
    : parts_(std::move(parts)),
      driver_(parts_.driver_object.cast<CallDriver&>()),
      store_(std::make_shared<SessionList>(parts_.sessions)) {}

bool DirectCalls::push(const PushAsked& asked) {
  const std::optional<CallPlan> known = plan_of(asked);
  if (!known) return false;
  const CallPlan& plan = *known;
  if (!carry_out(plan, asked.values, Py_None, Py_None)) return false;
  parts_.sent(plan.op, plan.layout);
  return true;
}

bool DirectCalls::pull(PullAsked& asked) {
  const std::optional<CallPlan> known = plan_of(asked);
  if (!known) return false;
  const CallPlan& plan = *known;
  if (!asked.out) asked.out = plan.layout.attr("fresh")();
  const std::optional<py::list> answers =
      carry_out(plan, *asked.out, asked.wait_s, asked.if_newer_than);
  if (!answers) return false;
  if (asked.if_newer_than.is_none()) {
    parts_.received(plan.layout, *answers);
  } else {
    asked.out = parts_.newer(plan.layout, *answers, *asked.out);
  }
  return true;
}

py::object DirectCalls::start_push(const PushAsked& asked) {
  const std::optional<CallPlan> known = plan_of(asked);
  return known ? start(*known, asked.values, Py_None, py::none()) : py::object();
}

py::object DirectCalls::start_pull(PullAsked& asked) {
  const std::optional<CallPlan> known = plan_of(asked);
  if (!known || !asked.if_newer_than.is_none()) return {};
  const CallPlan& plan = *known;
  if (!asked.out) asked.out = plan.layout.attr("fresh")();
  return start(plan, *asked.out, asked.wait_s, *asked.out);
}

std::optional<CallPlan> DirectCalls::plan_of(const PushAsked& asked) const {
  static PyObject* const what = interned("push");
  return plan(py::make_tuple(py::handle(what), asked.names, asked.op));
}

std::optional<CallPlan> DirectCalls::plan_of(const PullAsked& asked) const {
  static PyObject* const what = interned("pull");
  std::optional<CallPlan> known =
      plan(py::make_tuple(py::handle(what), asked.names, asked.dtype, py::bool_(!asked.out)));
  if (known && !may_go(*known, asked)) known.reset();
  return known;
}

// A shard answers a frame as of one decision. Whether several answers are of the same is looked at on the loop, and so
// is what can't be asked for.
bool DirectCalls::may_go(const CallPlan& plan, const PullAsked& asked) const {
  const bool any = asked.if_newer_than.is_none();
  const bool consistent = asked.consistent.is_none() ? parts_.reads_consistently && any
                                                     : asked.consistent.ptr() != Py_False;
  if (!consistent) return true;
  return any && (plan.frames->num_frames() <= 1 || !plan.layout.attr("is_trained").cast<bool>());
}

// What cannot be looked up, such as a name that is a list, is for others to complain of.
std::optional<CallPlan> DirectCalls::plan(const py::tuple& key) const {
  PyObject* const found = PyDict_GetItemWithError(py::object(parts_.plans[0]).ptr(), key.ptr());
  if (found != nullptr) return py::handle(found).cast<const CallPlan&>();
  PyErr_Clear();
  return std::nullopt;
}

// A time that is named for this call makes terms of its own.
py::object DirectCalls::terms_of(const CallPlan& plan, py::handle wait_s) const {
  if (wait_s.is_none()) {
    PyObject* const all =
        PyDict_GetItemWithError(py::object(parts_.terms[0]).ptr(), parts_.whose.ptr());
    PyObject* const known = all == nullptr ? nullptr : PyDict_GetItemWithError(all, plan.op.ptr());
    if (known != nullptr) return py::reinterpret_borrow<py::object>(known);
  }
  return parts_.renew(plan.op, plan.layout, wait_s);
}

std::optional<py::list> DirectCalls::carry_out(const CallPlan& plan, const py::sequence& arrays,
                                               py::handle wait_s, py::handle if_newer_than) {
  std::optional<uint64_t> newer_than;
  if (!if_newer_than.is_none()) {
    newer_than = version_of(if_newer_than);
    if (!newer_than) return std::nullopt;
  }
  std::optional<std::vector<Segments>> memories =
      plan.frames->map().of_arrays(arrays, /*writable=*/plan.reads);
  if (!memories) return std::nullopt;
  const py::object terms = terms_of(plan, wait_s);
  if (terms.is_none()) return std::nullopt;
  const auto call = std::make_shared<Call>(plan, std::move(*memories), store_,
                                           terms.cast<const CallTerms&>(), newer_than);
  switch (driver_.call(*call)) {
    case CallDriver::Outcome::kNotNow: return std::nullopt;
    case CallDriver::Outcome::kLeft: return conclude_left(plan, call);
    case CallDriver::Outcome::kAnswered: break;
  }
  if (call->leaves_something()) parts_.starting->look_after(plan.layout);
  if (!call->succeeded()) return py::list(parts_.conclude(plan.layout, call));
  return plan.reads ? call->answers() : py::list();
}

py::list DirectCalls::conclude_left(const CallPlan& plan, const std::shared_ptr<Call>& call) {
  try {
    return py::list(parts_.conclude(plan.layout, call));
  } catch (...) {
    if (!call->over()) driver_.forget(*call);  // interrupted
    throw;
  }
}

py::object DirectCalls::start(const CallPlan& plan, const py::sequence& arrays, py::handle wait_s,
                              py::object results) {
  const StartingParts& starting = *parts_.starting;
  if (plan.frames->num_frames() == 0 || starting.paced().ptr() == Py_True) return {};
  std::optional<std::vector<Segments>> memories =
      plan.frames->map().of_arrays(arrays, /*writable=*/plan.reads);
  if (!memories) return {};
  if (driver_.has_ready()) starting.catch_up();
  const py::object terms = terms_of(plan, wait_s);
  if (terms.is_none()) return {};
  const auto call =
      std::make_shared<Call>(plan, std::move(*memories), store_, terms.cast<const CallTerms&>());
  call->start(parts_.starting, std::move(results));
  const std::optional<bool> all_done = driver_.start(*call);
  if (!all_done) return {};
  if (!*all_done) starting.look_after(plan.layout);
  return call->whole();
}

void bind_direct_calls(py::module_& m) {
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
  using namespace py::literals;
  py::class_<DirectCalls> calls(m, "DirectCalls", py::is_final());
  calls.def(py::init([](py::object driver, py::list sessions, py::sequence plans, py::list terms,
                        py::object whose, py::object renew, py::object sent, py::object received,
                        py::object newer, py::object conclude, bool reads_consistently,
                        std::shared_ptr<StartingParts> starting) {
              return DirectCalls({std::move(driver), std::move(sessions), std::move(plans),
                                  std::move(terms), std::move(whose), std::move(renew),
                                  std::move(sent), std::move(received), std::move(newer),
                                  std::move(conclude), reads_consistently, std::move(starting)});
            }),
            "driver"_a, "sessions"_a, py::kw_only(), "plans"_a, "terms"_a, "whose"_a, "renew"_a,
            "sent"_a, "received"_a, "newer"_a, "conclude"_a, "reads_consistently"_a, "starting"_a);
  for (PyMethodDef& method : methods) add_method(calls, method);
}

}  // namespace psstore::bindings
