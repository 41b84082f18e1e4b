// Locks that clang's thread-safety analysis understands: std::mutex and std::shared_mutex, annotated.
//
// Every member that a lock guards says GUARDED_BY(lock); every function that needs it held says
// REQUIRES(lock). clang checks both with -Wthread-safety; other compilers see nothing.
// The attributes are described in https://clang.llvm.org/docs/ThreadSafetyAnalysis.html.
#pragma once

#include <mutex>
#include <shared_mutex>

#if defined(__clang__)
#define PSSTORE_THREAD_ANNOTATION(x) __attribute__((x))
#else
#define PSSTORE_THREAD_ANNOTATION(x)
#endif

#define CAPABILITY(name) PSSTORE_THREAD_ANNOTATION(capability(name))
#define SCOPED_CAPABILITY PSSTORE_THREAD_ANNOTATION(scoped_lockable)
#define GUARDED_BY(...) PSSTORE_THREAD_ANNOTATION(guarded_by(__VA_ARGS__))
#define REQUIRES(...) PSSTORE_THREAD_ANNOTATION(requires_capability(__VA_ARGS__))
#define REQUIRES_SHARED(...) PSSTORE_THREAD_ANNOTATION(requires_shared_capability(__VA_ARGS__))
#define EXCLUDES(...) PSSTORE_THREAD_ANNOTATION(locks_excluded(__VA_ARGS__))
#define ACQUIRE(...) PSSTORE_THREAD_ANNOTATION(acquire_capability(__VA_ARGS__))
#define ACQUIRE_SHARED(...) PSSTORE_THREAD_ANNOTATION(acquire_shared_capability(__VA_ARGS__))
#define RELEASE(...) PSSTORE_THREAD_ANNOTATION(release_capability(__VA_ARGS__))
#define RELEASE_SHARED(...) PSSTORE_THREAD_ANNOTATION(release_shared_capability(__VA_ARGS__))
#define NO_THREAD_SAFETY_ANALYSIS PSSTORE_THREAD_ANNOTATION(no_thread_safety_analysis)

namespace psstore {

class CAPABILITY("mutex") Mutex {
 public:
  void lock() ACQUIRE() { mutex_.lock(); }
  void unlock() RELEASE() { mutex_.unlock(); }

 private:
  std::mutex mutex_;
};

// Many readers or one writer; a waiting writer goes before readers that come after it. Without the
// gate glibc's rwlock prefers readers, and threads that read without a pause would starve a decision.
// Not recursive, not even for readers.
class CAPABILITY("mutex") SharedMutex {
 public:
  void lock() ACQUIRE() {
    const std::lock_guard<std::mutex> gate(gate_);
    mutex_.lock();
  }
  void unlock() RELEASE() { mutex_.unlock(); }
  void lock_shared() ACQUIRE_SHARED() {
    const std::lock_guard<std::mutex> gate(gate_);
    mutex_.lock_shared();
  }
  void unlock_shared() RELEASE_SHARED() { mutex_.unlock_shared(); }

 private:
  std::mutex gate_;  // held while a writer waits for the readers before it
  std::shared_mutex mutex_;
};

class SCOPED_CAPABILITY MutexLock {
 public:
  explicit MutexLock(Mutex& mutex) ACQUIRE(mutex) : mutex_(mutex) { mutex_.lock(); }
  ~MutexLock() RELEASE() { mutex_.unlock(); }
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

 private:
  Mutex& mutex_;
};

class SCOPED_CAPABILITY ExclusiveLock {
 public:
  explicit ExclusiveLock(SharedMutex& mutex) ACQUIRE(mutex) : mutex_(mutex) { mutex_.lock(); }
  ~ExclusiveLock() RELEASE() { mutex_.unlock(); }
  ExclusiveLock(const ExclusiveLock&) = delete;
  ExclusiveLock& operator=(const ExclusiveLock&) = delete;

 private:
  SharedMutex& mutex_;
};

class SCOPED_CAPABILITY SharedLock {
 public:
  explicit SharedLock(SharedMutex& mutex) ACQUIRE_SHARED(mutex) : mutex_(mutex) {
    mutex_.lock_shared();
  }
  ~SharedLock() RELEASE() { mutex_.unlock_shared(); }
  SharedLock(const SharedLock&) = delete;
  SharedLock& operator=(const SharedLock&) = delete;

 private:
  SharedMutex& mutex_;
};

}  // namespace psstore
