#include "tls/session.h"

#include <arpa/inet.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "core/descriptor.h"

namespace psstore {
namespace {

using namespace openssl;

// The first byte of a TLS connection: a record of the handshake (RFC 8446, 5.1). A frame of ours begins otherwise.
constexpr char kHandshakeRecord = 22;

// After so many records of 16 KiB an AES-GCM key is to be replaced (RFC 8446, 5.5: 2^24.5), which OpenSSL leaves to us.
constexpr uint64_t kRecordsPerKey = uint64_t{1} << 24;

bool is_ip_address(const std::string& host) {
  in6_addr address;
  return inet_pton(AF_INET, host.c_str(), &address) == 1 ||
         inet_pton(AF_INET6, host.c_str(), &address) == 1;
}

TlsSession& session_of(Bio* bio) {
  return *static_cast<TlsSession*>(library().BIO_get_data(bio));
}

Ssl* make_ssl(const TlsContext& context) {
  Ssl* const ssl = library().SSL_new(context.get());
  if (ssl == nullptr) throw Error(ErrorCode::TLS_FAILED, "OpenSSL: " + take_failure().text);
  return ssl;
}

}  // namespace

TlsSession::TlsSession(std::shared_ptr<const TlsContext> context, const std::string& host)
    : context_(std::move(context)), host_(host), ssl_(make_ssl(*context_)) {
  const Library& ssl = library();
  Bio* const bio = ssl.BIO_new(method());
  ssl.BIO_set_data(bio, this);
  ssl.BIO_set_init(bio, 1);
  ssl.SSL_set_bio(ssl_, bio, bio);
  if (context_->is_server()) {
    ssl.SSL_set_accept_state(ssl_);
    return;
  }
  ssl.SSL_set_connect_state(ssl_);
  if (is_ip_address(host_)) {
    ssl.X509_VERIFY_PARAM_set1_ip_asc(ssl.SSL_get0_param(ssl_), host_.c_str());
  } else {
    ssl.SSL_set1_host(ssl_, host_.c_str());
    ssl.SSL_ctrl(ssl_, kCtrlHostname, 0, const_cast<char*>(host_.c_str()));
  }
}

// ---- what OpenSSL calls -------------------------------------------------------------------------------

const BioMethod* TlsSession::method() {
  static BioMethod* const made = [] {
    const Library& ssl = library();
    BioMethod* const fresh = ssl.BIO_meth_new(kBioTypeSourceSink | 100, "psstore socket");
    ssl.BIO_meth_set_read(fresh, read_socket);
    ssl.BIO_meth_set_write(fresh, write_socket);
    ssl.BIO_meth_set_ctrl(fresh, control);
    return fresh;
  }();
  return made;
}

int TlsSession::read_socket(Bio* bio, char* to, int num_bytes) {
  TlsSession& self = session_of(bio);
  const Library& ssl = library();
  ssl.BIO_clear_flags(bio, kBioRead | kBioWrite | kBioRetry);
  const int flags = std::exchange(self.may_sleep_, false) ? 0 : MSG_DONTWAIT;
  const ssize_t received = recv(self.fd_, to, static_cast<size_t>(num_bytes), flags);
  if (received > 0) {
    self.has_begun_ = true;  // whoever is told something first is heard in send()
    return static_cast<int>(received);
  }
  if (received < 0 && would_block(errno)) {
    ssl.BIO_set_flags(bio, kBioRead | kBioRetry);
    return -1;
  }
  self.ended_ = true;
  self.error_ = received < 0 ? errno : 0;
  return 0;
}

int TlsSession::write_socket(Bio* bio, const char* from, int num_bytes) {
  TlsSession& self = session_of(bio);
  const Library& ssl = library();
  ssl.BIO_clear_flags(bio, kBioRead | kBioWrite | kBioRetry);
  const ssize_t taken =
      ::send(self.fd_, from, static_cast<size_t>(num_bytes), MSG_DONTWAIT | MSG_NOSIGNAL);
  if (taken >= 0) {
    self.num_sent_ += taken;
    return static_cast<int>(taken);
  }
  if (would_block(errno)) {
    ssl.BIO_set_flags(bio, kBioWrite | kBioRetry);
  } else {
    self.error_ = errno;
  }
  return -1;
}

long TlsSession::control(Bio*, int command, long, void*) {
  return command == kBioCtrlFlush ? 1 : 0;
}

// ---- what is received ---------------------------------------------------------------------------------

ssize_t TlsSession::receive(int fd, std::span<std::byte> window, bool may_sleep) {
  const MutexLock lock(mutex_);
  fd_ = fd;
  may_sleep_ = may_sleep;
  if (failure_ && !(is_told_ && context_->is_server())) tell_failure();
  if (failure_) return recv(fd, window.data(), window.size(), MSG_DONTWAIT);
  if (context_->is_server() && !has_begun_ && is_plain(fd)) {
    to_plain_peer_ = true;
    failure_ = Error(ErrorCode::TLS_FAILED,
                     "this store speaks TLS 1.3 here, and what came is not: connect to pss:// in "
                     "place of ps://");
    tell_failure();
  }
  const ssize_t received = read(window);
  if (failure_ && received <= 0) tell_failure();
  return received;
}

void TlsSession::tell_failure() {
  is_told_ = true;
  throw Error(*failure_);
}

bool TlsSession::is_plain(int fd) {
  char first = 0;
  const ssize_t found = recv(fd, &first, 1, MSG_PEEK | MSG_DONTWAIT);
  has_begun_ = found == 1 && first == kHandshakeRecord;
  return found == 1 && !has_begun_;
}

ssize_t TlsSession::read(std::span<std::byte> window) {
  const Library& ssl = library();
  size_t num_read = 0;
  is_dry_ = false;
  while (num_read < window.size()) {
    const auto room = static_cast<int>(std::min<size_t>(window.size() - num_read, 1u << 30));
    const int received = ssl.SSL_read(ssl_, window.data() + num_read, room);
    if (received > 0) {
      num_read += static_cast<size_t>(received);
      awaits_peer_ = false;
      continue;
    }
    is_dry_ = true;
    const int error = ssl.SSL_get_error(ssl_, received);
    if (error == kWantRead || error == kWantWrite) {
      if (ssl.SSL_is_init_finished(ssl_) != 0) awaits_peer_ = false;
      if (num_read > 0) break;
      errno = EAGAIN;
      return -1;
    }
    if (error != kZeroReturn && !ended_) fail();
    ssl.ERR_clear_error();
    if (num_read > 0 || failure_) break;
    errno = error_;
    return error_ == 0 ? 0 : -1;
  }
  return static_cast<ssize_t>(num_read);
}

bool TlsSession::holds_bytes() const {
  const MutexLock lock(mutex_);
  if (failure_) return !is_told_;
  return !is_dry_ && library().SSL_has_pending(ssl_) != 0;
}

// ---- what is sent -------------------------------------------------------------------------------------

ssize_t TlsSession::send(int fd, std::span<const iovec> ranges) {
  const MutexLock lock(mutex_);
  fd_ = fd;
  if (to_plain_peer_) {
    msghdr message{};
    message.msg_iov = const_cast<iovec*>(ranges.data());  // only read
    message.msg_iovlen = ranges.size();
    return sendmsg(fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
  }
  if (failure_) {
    errno = EPIPE;
    return -1;
  }
  return write(next_record(ranges));
}

std::span<const std::byte> TlsSession::next_record(std::span<const iovec> ranges) {
  // What OpenSSL has encrypted is not looked at again; only its length has to be the same.
  if (offered_ > 0) return std::span(gathered_).first(offered_);
  const iovec& first = ranges.front();
  if (ranges.size() == 1 || first.iov_len >= kRecordBytes) {
    return {static_cast<const std::byte*>(first.iov_base), std::min(first.iov_len, kRecordBytes)};
  }
  size_t size = 0;
  for (const iovec& range : ranges) {
    const size_t taken = std::min(range.iov_len, kRecordBytes - size);
    std::memcpy(gathered_.data() + size, range.iov_base, taken);
    size += taken;
    if (size == kRecordBytes) break;
  }
  return std::span(gathered_).first(size);
}

ssize_t TlsSession::write(std::span<const std::byte> bytes) {
  const Library& ssl = library();
  const int written = ssl.SSL_write(ssl_, bytes.data(), static_cast<int>(bytes.size()));
  if (written > 0) {
    offered_ = 0;
    awaits_peer_ = false;
    if (++num_records_ == kRecordsPerKey) {
      num_records_ = 0;
      ssl.SSL_key_update(ssl_, kKeyUpdateNotRequested);
    }
    return written;
  }
  const int error = ssl.SSL_get_error(ssl_, written);
  if (error == kWantRead || error == kWantWrite) {
    awaits_peer_ = error == kWantRead;
    // In the handshake nothing of it is encrypted yet.
    offered_ = awaits_peer_ || ssl.SSL_is_init_finished(ssl_) == 0 ? 0 : bytes.size();
    errno = EAGAIN;
    return -1;
  }
  if (error_ == 0) fail();
  ssl.ERR_clear_error();
  errno = error_ == 0 ? EPIPE : error_;
  return -1;
}

void TlsSession::say_end(int fd) {
  const MutexLock lock(mutex_);
  fd_ = fd;
  if (failure_ || library().SSL_is_init_finished(ssl_) == 0) return;
  library().SSL_shutdown(ssl_);
  library().ERR_clear_error();
}

bool TlsSession::awaits_peer() const {
  const MutexLock lock(mutex_);
  return awaits_peer_;
}

int64_t TlsSession::num_sent() const {
  const MutexLock lock(mutex_);
  return num_sent_;
}

// ---- what went wrong ----------------------------------------------------------------------------------

void TlsSession::fail() {
  const Failure failure = take_failure();
  failure_ = Error(ErrorCode::TLS_FAILED, blamed(failure));
}

std::string TlsSession::blamed(const Failure& failure) const {
  const std::string said = " (" + failure.text + ")";
  if (context_->is_server()) {
    switch (failure.reason) {
      case kNoPeerCertificate:
        return "a client without a certificate: with --tls-ca this store lets in only those that "
               "have one of that CA; it connects with tls_cert= and tls_key=, or PSSTORE_TLS_CERT "
               "and PSSTORE_TLS_KEY";
      case kVerifyFailed:
        return std::string("a client whose certificate is not accepted: ") +
               library().X509_verify_cert_error_string(library().SSL_get_verify_result(ssl_));
      case kAlertUnknownCa:
        return "a client does not know the CA of this store's certificate: it is to be given it, "
               "by tls_ca= or PSSTORE_TLS_CA";
      default: return "the TLS handshake with a client failed" + said;
    }
  }
  const std::string peer = "the store at " + host_;
  switch (failure.reason) {
    case kVerifyFailed: {
      const long why = library().SSL_get_verify_result(ssl_);
      const std::string text = library().X509_verify_cert_error_string(why);
      if (why == kHostMismatch || why == kIpMismatch) {
        return "the certificate of " + peer + " is of another name (" + text +
               "): connect to a name that stands in it, or make one whose subjectAltName has " +
               host_ + "; openssl x509 -in CERT -noout -ext subjectAltName shows them";
      }
      if (why == kExpired || why == kNotYetValid) {
        return "the certificate of " + peer + " is not valid now (" + text +
               "): renew it there, the store takes the new file by itself; or is this machine's "
               "clock wrong?";
      }
      if (why == kInvalidPurpose) {
        return "the certificate of " + peer + " is not for servers (" + text +
               "): make one whose extendedKeyUsage has serverAuth, or that has none";
      }
      return "the certificate of " + peer + " is of no CA that is trusted here (" + text +
             "): give its CA by tls_ca= or PSSTORE_TLS_CA";
    }
    case kAlertCertificateRequired:
      return peer +
             " lets in only clients with a certificate of its CA: give yours by tls_cert= and "
             "tls_key=, or PSSTORE_TLS_CERT and PSSTORE_TLS_KEY";
    case kAlertUnknownCa:
    case kAlertBadCertificate:
    case kAlertExpired:
      return peer + " does not accept this client's certificate" + said +
             ": it is to be of the CA that the store was started with (--tls-ca), and valid now";
    case kAlertProtocolVersion: return peer + " does not speak TLS 1.3" + said;
    default: break;
  }
  if (library().SSL_is_init_finished(ssl_) != 0) return "TLS with " + peer + " failed" + said;
  if (failure.reason < kAlerts) {
    return "what is at " + host_ + " does not speak TLS 1.3" + said +
           ": a store that was started without --tls-cert is at ps:// in place of pss://";
  }
  return "the TLS handshake with " + peer + " failed" + said;
}

}  // namespace psstore
