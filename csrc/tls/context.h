// One side's certificates: who it says that it is, and whom it believes.
#pragma once

#include <memory>
#include <string>

#include "tls/openssl.h"

namespace psstore {

class TlsContext {
 public:
  struct Files {
    std::string cert;  // PEM: its certificate, and those that lead from there to its CA; '': none
    std::string key;   // PEM, of `cert`
    std::string ca;    // PEM: whom it believes; '': of a client, the system's CAs
  };

  // Reads the files; what becomes of them afterwards does not matter. A server with a CA lets in only clients whose
  // certificates are of it. Throws TLS_FAILED that names the file.
  TlsContext(bool is_server, const Files& files);
  TlsContext(const TlsContext&) = delete;
  TlsContext& operator=(const TlsContext&) = delete;
  ~TlsContext() { openssl::library().SSL_CTX_free(context_); }

  bool is_server() const { return is_server_; }
  openssl::SslContext* get() const { return context_; }

 private:
  void configure();
  void read(const Files& files);

  const bool is_server_;
  openssl::SslContext* const context_;
};

}  // namespace psstore
