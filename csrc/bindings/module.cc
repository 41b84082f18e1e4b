// The extension psstore._core: one call per file of this folder.
#include "bindings/common.h"

PYBIND11_MODULE(_core, m) {
  namespace bindings = psstore::bindings;
  m.doc() = "The compiled core of psstore; psstore/_core.pyi says what is in it.";
  bindings::register_error_translation();
  bindings::bind_constants(m);
  bindings::bind_memory(m);
  bindings::bind_frame_map(m);
  bindings::bind_wire(m);
  bindings::bind_decoder(m);
  bindings::bind_device(m);
  bindings::bind_shm(m);
  bindings::bind_tls(m);
  bindings::bind_rows(m);
  bindings::bind_table(m);
  bindings::bind_server(m);
  bindings::bind_session(m);
  bindings::bind_calls(m);
  bindings::bind_call_driver(m);
  bindings::bind_direct_calls(m);
  bindings::bind_liveness(m);
  bindings::bind_kernels(m);
  bindings::bind_codec(m);
  bindings::bind_changes(m);
  bindings::bind_batches(m);
}
