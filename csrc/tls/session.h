// TLS 1.3 on one connected socket: what is sent is encrypted, what is received is decrypted, and the handshake goes on
// in whichever of the two is called. Calls are as sendmsg(2) and recv(2), of which they know nothing more.
//
// Any thread: a worker's heartbeats are sent by one, and what comes back is received by another.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "core/errors.h"
#include "core/mutex.h"
#include "tls/context.h"

namespace psstore {

class TlsSession {
 public:
  // `host`: of a client, whom it means to speak to: a name or an IP address that the peer's certificate has to have.
  TlsSession(std::shared_ptr<const TlsContext> context, const std::string& host);
  TlsSession(const TlsSession&) = delete;
  TlsSession& operator=(const TlsSession&) = delete;
  ~TlsSession() { openssl::library().SSL_free(ssl_); }

  // Sends from the beginning of `ranges`; what was offered and not taken has to be offered again, first of all.
  // Returns how many bytes, or -1 with errno.
  ssize_t send(int fd, std::span<const iovec> ranges);
  // Fills the window as far as bytes are there. Returns how many, 0 at the end, -1 with errno EAGAIN if there are none
  // now, or another. `may_sleep`: for as long as a plain recv does. Throws TLS_FAILED that says what the peer, or the
  // certificate of either, did wrong; a client's says so again
  // whenever it is called, a server's then gets what still comes, for nobody.
  ssize_t receive(int fd, std::span<std::byte> window, bool may_sleep);
  // Says that nothing more will come.
  void say_end(int fd);
  // There is something to receive that the socket does not tell of.
  bool holds_bytes() const;
  // What is to be sent can't be before something was received.
  bool awaits_peer() const;
  // Bytes that the socket took, as they were encrypted.
  int64_t num_sent() const;

 private:
  static constexpr size_t kRecordBytes = 16u
                                         << 10;  // the most that one record holds (RFC 8446, 5.1)

  // Within a call, which holds the lock.
  static int read_socket(openssl::Bio* bio, char* to, int num_bytes) NO_THREAD_SAFETY_ANALYSIS;
  static int write_socket(openssl::Bio* bio, const char* from,
                          int num_bytes) NO_THREAD_SAFETY_ANALYSIS;
  static long control(openssl::Bio* bio, int command, long, void*);
  static const openssl::BioMethod* method();

  [[noreturn]] void tell_failure() REQUIRES(mutex_);
  bool is_plain(int fd) REQUIRES(mutex_);
  ssize_t read(std::span<std::byte> window) REQUIRES(mutex_);
  ssize_t write(std::span<const std::byte> bytes) REQUIRES(mutex_);
  // The next record's bytes, of one range or copied together from several.
  std::span<const std::byte> next_record(std::span<const iovec> ranges) REQUIRES(mutex_);
  // Why a call failed, for the next receive.
  void fail() REQUIRES(mutex_);
  std::string blamed(const openssl::Failure& failure) const REQUIRES(mutex_);

  const std::shared_ptr<const TlsContext> context_;
  const std::string host_;
  openssl::Ssl* const ssl_;
  mutable Mutex mutex_;
  int fd_ GUARDED_BY(mutex_) = -1;             // of the call under way
  bool may_sleep_ GUARDED_BY(mutex_) = false;  // the same
  bool ended_ GUARDED_BY(mutex_) = false;      // the socket, for what is read
  int error_ GUARDED_BY(mutex_) = 0;           // errno of the socket
  bool has_begun_ GUARDED_BY(mutex_) = false;  // the peer is known to speak TLS
  bool is_dry_ GUARDED_BY(mutex_) = true;      // there is nothing more to read without the socket
  bool awaits_peer_ GUARDED_BY(mutex_) = false;
  bool to_plain_peer_ GUARDED_BY(mutex_) = false;  // who has to be told that this is TLS
  std::optional<Error> failure_ GUARDED_BY(mutex_);
  bool is_told_ GUARDED_BY(mutex_) = false;  // the failure
  int64_t num_sent_ GUARDED_BY(mutex_) = 0;
  uint64_t num_records_ GUARDED_BY(mutex_) = 0;  // sent with the present key
  size_t offered_ GUARDED_BY(mutex_) = 0;  // bytes of a record that is encrypted and not taken yet
  std::array<std::byte, kRecordBytes> gathered_ GUARDED_BY(mutex_);
};

}  // namespace psstore
