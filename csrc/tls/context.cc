#include "tls/context.h"

#include "core/errors.h"

namespace psstore {
namespace {

using namespace openssl;

// What is asked of the kernel at a time: records of 16 KiB that have come are read together.
constexpr size_t kReadBufferBytes = 64u << 10;

// Nobody is asked for the passphrase of a key: there is no terminal to ask at.
int no_passphrase(char*, int, int, void*) {
  return 0;
}

[[noreturn]] void throw_unusable(const std::string& what, const std::string& file) {
  throw Error(ErrorCode::TLS_FAILED, what + " " + file + ": " + take_failure().text);
}

}  // namespace

TlsContext::TlsContext(bool is_server, const Files& files)
    : is_server_(is_server), context_(library().SSL_CTX_new(library().TLS_method())) {
  if (context_ == nullptr) throw_unusable("OpenSSL", "does not start");
  try {
    configure();
    read(files);
  } catch (...) {
    library().SSL_CTX_free(context_);
    throw;
  }
}

void TlsContext::configure() {
  const Library& ssl = library();
  ssl.SSL_CTX_ctrl(context_, kCtrlMinVersion, kTls13, nullptr);
  ssl.SSL_CTX_ctrl(context_, kCtrlMode, kPartialWrite | kMovingWriteBuffer, nullptr);
  ssl.SSL_CTX_ctrl(context_, kCtrlReadAhead, 1, nullptr);
  ssl.SSL_CTX_set_default_read_buffer_len(context_, kReadBufferBytes);
  ssl.SSL_CTX_set_default_passwd_cb(context_, no_passphrase);
  ssl.SSL_CTX_set_num_tickets(context_, 0);  // connections last: none is resumed
}

void TlsContext::read(const Files& files) {
  const Library& ssl = library();
  if (!files.cert.empty()) {
    if (ssl.SSL_CTX_use_certificate_chain_file(context_, files.cert.c_str()) != 1) {
      throw_unusable("certificate", files.cert);
    }
    if (ssl.SSL_CTX_use_PrivateKey_file(context_, files.key.c_str(), kPem) != 1) {
      throw_unusable("private key", files.key);
    }
    if (ssl.SSL_CTX_check_private_key(context_) != 1) {
      throw_unusable("certificate " + files.cert + " and private key", files.key);
    }
  }
  if (!files.ca.empty()) {
    if (ssl.SSL_CTX_load_verify_locations(context_, files.ca.c_str(), nullptr) != 1) {
      throw_unusable("CA", files.ca);
    }
  } else if (!is_server_) {
    ssl.SSL_CTX_set_default_verify_paths(context_);
  }
  // A certificate that is named as a CA is believed, whoever has signed it: one that is its own CA, or a store's own.
  ssl.X509_VERIFY_PARAM_set_flags(ssl.SSL_CTX_get0_param(context_), kPartialChain);
  if (!is_server_) {
    ssl.SSL_CTX_set_verify(context_, kVerifyPeer, nullptr);
  } else if (!files.ca.empty()) {
    ssl.SSL_CTX_set_verify(context_, kVerifyPeer | kVerifyRequired, nullptr);
    // Shards are clients of each other, and what writes their checkpoints is: a server's certificate, which may be for
    // servers alone, is all that they have.
    ssl.X509_VERIFY_PARAM_set_purpose(ssl.SSL_CTX_get0_param(context_), kAnyPurpose);
  }
}

}  // namespace psstore
