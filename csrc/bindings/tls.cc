// TlsContext and TlsSession for Python, which hands sessions to whoever has the sockets.
#include <memory>
#include <string>

#include "bindings/common.h"
#include "tls/session.h"

namespace psstore::bindings {

void bind_tls(py::module_& m) {
  using namespace py::literals;
  py::class_<TlsSession, std::shared_ptr<TlsSession>>(m, "TlsSession", py::is_final());
  py::class_<TlsContext, std::shared_ptr<TlsContext>>(m, "TlsContext", py::is_final())
      .def(py::init([](bool server, std::string cert, std::string key, std::string ca) {
             return std::make_shared<TlsContext>(
                 server, TlsContext::Files{std::move(cert), std::move(key), std::move(ca)});
           }),
           py::kw_only(), "server"_a, "cert"_a = "", "key"_a = "", "ca"_a = "")
      .def(
          "session",
          [](const std::shared_ptr<TlsContext>& self, const std::string& host) {
            return std::make_shared<TlsSession>(self, host);
          },
          "host"_a = "");
}

}  // namespace psstore::bindings
