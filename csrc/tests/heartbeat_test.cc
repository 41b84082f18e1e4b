// Heartbeat: it beats, it ends at once when told or when the peer is gone, it never blocks on the peer.
#include "liveness/heartbeat.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cmath>
#include <string>
#include <thread>

#include "core/errors.h"

namespace psstore::testing {
namespace {

using std::chrono::steady_clock;

constexpr double kNever = 3600;

class HeartbeatTest : public ::testing::Test {
 protected:
  void SetUp() override { ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM, 0, sockets_.data()), 0); }
  void TearDown() override {
    close_ours();
    close_peers();
  }
  void close_ours() { close_end(0); }
  void close_peers() { close_end(1); }
  int ours() const { return sockets_[0]; }

  // Blocks until `size` bytes are there or the connection ends; returns what came.
  std::string receive(size_t size) {
    std::string bytes(size, '\0');
    const ssize_t received = ::recv(sockets_[1], bytes.data(), size, MSG_WAITALL);
    bytes.resize(received > 0 ? static_cast<size_t>(received) : 0);
    return bytes;
  }

 private:
  void close_end(size_t end) {
    if (sockets_[end] >= 0) ::close(sockets_[end]);
    sockets_[end] = -1;
  }
  std::array<int, 2> sockets_{-1, -1};
};

void wait_until_dead(const Heartbeat& heartbeat) {
  while (heartbeat.alive()) std::this_thread::yield();
}

TEST_F(HeartbeatTest, BeatsAtOnceAndAgain) {
  Heartbeat heartbeat(ours(), "beat", 0.005);
  EXPECT_EQ(receive(12), "beatbeatbeat");
  EXPECT_TRUE(heartbeat.alive());
}

TEST_F(HeartbeatTest, StopsPromptlyAndClosesItsDuplicate) {
  Heartbeat heartbeat(ours(), "beat", kNever);
  EXPECT_EQ(receive(4), "beat");
  const auto begin = steady_clock::now();
  heartbeat.stop();
  heartbeat.stop();
  EXPECT_LT(steady_clock::now() - begin, std::chrono::seconds(5));
  EXPECT_FALSE(heartbeat.alive());
  close_ours();
  EXPECT_EQ(receive(1), "");  // the end of the stream: nothing else holds the socket
}

TEST_F(HeartbeatTest, OutlivesTheDescriptorItWasGiven) {
  Heartbeat heartbeat(ours(), "beat", 0.005);
  close_ours();
  EXPECT_EQ(receive(8), "beatbeat");
}

TEST_F(HeartbeatTest, EndsWhenThePeerIsGone) {
  Heartbeat heartbeat(ours(), "beat", 0.005);
  close_peers();
  wait_until_dead(heartbeat);
}

TEST_F(HeartbeatTest, APeerThatDoesNotReadBlocksNobody) {
  const int flags = ::fcntl(ours(), F_GETFL);
  for (const int nonblocking : {0, O_NONBLOCK}) {
    ::fcntl(ours(), F_SETFL, flags | nonblocking);
    // More than the socket holds: the first beat can't be finished.
    Heartbeat heartbeat(ours(), std::string(4u << 20, 'x'), 0.001);
    EXPECT_EQ(receive(1), "x");
    EXPECT_TRUE(heartbeat.alive());
    heartbeat.stop();
  }
}

TEST_F(HeartbeatTest, ALongBeatIsFinishedWhenThereIsRoom) {
  const std::string frame(1u << 20, 'x');
  Heartbeat heartbeat(ours(), frame, kNever);
  EXPECT_EQ(receive(frame.size()), frame);
}

TEST_F(HeartbeatTest, AForkedChildLetsGoOfItWithoutTheThread) {
  Heartbeat heartbeat(ours(), "beat", 0.005);
  EXPECT_EQ(receive(4), "beat");
  const pid_t child = ::fork();
  if (child == 0) {
    const bool was_alive = heartbeat.alive();
    heartbeat.stop();
    ::_exit(was_alive ? 1 : 0);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(receive(4), "beat");  // the parent's goes on
}

TEST_F(HeartbeatTest, RefusesWhatCannotBeat) {
  EXPECT_THROW(Heartbeat(-1, "beat", 1), Error);
  EXPECT_THROW(Heartbeat(STDERR_FILENO, "beat", 1), Error);
  EXPECT_THROW(Heartbeat(ours(), "", 1), Error);
  for (const double interval : {0.0, -1.0, 1e9, static_cast<double>(NAN)}) {
    EXPECT_THROW(Heartbeat(ours(), "beat", interval), Error) << interval;
  }
}

}  // namespace
}  // namespace psstore::testing
