// The functions of OpenSSL that TLS needs, found when the first certificate is read: psstore is built where no
// OpenSSL is installed, and one build runs with 1.1.1 and with 3.x, whose names and numbers used here are the same.
#pragma once

#include <cstddef>
#include <string>
#include <type_traits>

namespace psstore::openssl {

// OpenSSL's, of which only it knows what is inside.
struct SslMethod;
struct SslContext;
struct Ssl;
struct BioMethod;
struct Bio;
struct VerifyParam;

// X(name, type): as openssl/ssl.h, bio.h, err.h, x509_vfy.h declare them.
#define PSSTORE_OPENSSL_FUNCTIONS(X)                                                   \
  X(TLS_method, const SslMethod*())                                                    \
  X(SSL_CTX_new, SslContext*(const SslMethod*))                                        \
  X(SSL_CTX_free, void(SslContext*))                                                   \
  X(SSL_CTX_ctrl, long(SslContext*, int, long, void*))                                 \
  X(SSL_CTX_set_num_tickets, int(SslContext*, size_t))                                 \
  X(SSL_CTX_set_default_passwd_cb, void(SslContext*, int (*)(char*, int, int, void*))) \
  X(SSL_CTX_set_default_read_buffer_len, void(SslContext*, size_t))                    \
  X(SSL_CTX_use_certificate_chain_file, int(SslContext*, const char*))                 \
  X(SSL_CTX_use_PrivateKey_file, int(SslContext*, const char*, int))                   \
  X(SSL_CTX_check_private_key, int(const SslContext*))                                 \
  X(SSL_CTX_load_verify_locations, int(SslContext*, const char*, const char*))         \
  X(SSL_CTX_set_default_verify_paths, int(SslContext*))                                \
  X(SSL_CTX_get0_param, VerifyParam*(SslContext*))                                     \
  X(X509_VERIFY_PARAM_set_flags, int(VerifyParam*, unsigned long))                     \
  X(X509_VERIFY_PARAM_set_purpose, int(VerifyParam*, int))                             \
  X(SSL_CTX_set_verify, void(SslContext*, int, void*))                                 \
  X(SSL_new, Ssl*(SslContext*))                                                        \
  X(SSL_free, void(Ssl*))                                                              \
  X(SSL_set_bio, void(Ssl*, Bio*, Bio*))                                               \
  X(SSL_set_connect_state, void(Ssl*))                                                 \
  X(SSL_set_accept_state, void(Ssl*))                                                  \
  X(SSL_ctrl, long(Ssl*, int, long, void*))                                            \
  X(SSL_set1_host, int(Ssl*, const char*))                                             \
  X(SSL_get0_param, VerifyParam*(Ssl*))                                                \
  X(X509_VERIFY_PARAM_set1_ip_asc, int(VerifyParam*, const char*))                     \
  X(SSL_read, int(Ssl*, void*, int))                                                   \
  X(SSL_write, int(Ssl*, const void*, int))                                            \
  X(SSL_get_error, int(const Ssl*, int))                                               \
  X(SSL_has_pending, int(const Ssl*))                                                  \
  X(SSL_is_init_finished, int(const Ssl*))                                             \
  X(SSL_shutdown, int(Ssl*))                                                           \
  X(SSL_key_update, int(Ssl*, int))                                                    \
  X(SSL_get_verify_result, long(const Ssl*))                                           \
  X(X509_verify_cert_error_string, const char*(long))                                  \
  X(ERR_peek_error, unsigned long())                                                   \
  X(ERR_clear_error, void())                                                           \
  X(ERR_reason_error_string, const char*(unsigned long))                               \
  X(BIO_meth_new, BioMethod*(int, const char*))                                        \
  X(BIO_meth_set_read, int(BioMethod*, int (*)(Bio*, char*, int)))                     \
  X(BIO_meth_set_write, int(BioMethod*, int (*)(Bio*, const char*, int)))              \
  X(BIO_meth_set_ctrl, int(BioMethod*, long (*)(Bio*, int, long, void*)))              \
  X(BIO_new, Bio*(const BioMethod*))                                                   \
  X(BIO_set_data, void(Bio*, void*))                                                   \
  X(BIO_get_data, void*(Bio*))                                                         \
  X(BIO_set_init, void(Bio*, int))                                                     \
  X(BIO_set_flags, void(Bio*, int))                                                    \
  X(BIO_clear_flags, void(Bio*, int))

struct Library {
#define PSSTORE_X(name, ...) std::add_pointer_t<__VA_ARGS__> name;
  PSSTORE_OPENSSL_FUNCTIONS(PSSTORE_X)
#undef PSSTORE_X
};

// Loaded once. Throws TLS_FAILED that says what to install.
const Library& library();

// What the calling thread's last call failed with, as OpenSSL says it; nothing is left of it.
struct Failure {
  int reason;  // its number, of ssl.h; 0: it did not say
  std::string text;
};
Failure take_failure();

// ---- numbers of its headers ---------------------------------------------------------------------------

inline constexpr int kCtrlMode = 33, kCtrlReadAhead = 41, kCtrlHostname = 55, kCtrlMinVersion = 123;
inline constexpr long kPartialWrite = 1, kMovingWriteBuffer = 2;
inline constexpr long kTls13 = 0x0304;
inline constexpr int kPem = 1;
inline constexpr int kVerifyPeer = 1, kVerifyRequired = 2;
inline constexpr int kWantRead = 2, kWantWrite = 3, kZeroReturn = 6;
inline constexpr int kKeyUpdateNotRequested = 0;
inline constexpr int kAnyPurpose = 7;
inline constexpr int kBioRead = 1, kBioWrite = 2, kBioRetry = 8, kBioCtrlFlush = 11;
inline constexpr int kBioTypeSourceSink = 0x400;
inline constexpr unsigned long kPartialChain = 0x80000;
// Reasons: SSL_R_…; an alert that the peer sent is 1000 and its number (RFC 8446, 6).
inline constexpr int kVerifyFailed = 134, kNoPeerCertificate = 199, kAlerts = 1000;
inline constexpr int kAlertBadCertificate = 1042, kAlertExpired = 1045, kAlertUnknownCa = 1048,
                     kAlertProtocolVersion = 1070, kAlertCertificateRequired = 1116;
// X509_V_ERR_…
inline constexpr long kNotYetValid = 9, kExpired = 10, kInvalidPurpose = 26, kHostMismatch = 62,
                      kIpMismatch = 64;

}  // namespace psstore::openssl
