// WriterFirstMutex: a std::shared_mutex whose writers do not starve.
#pragma once

#include <pthread.h>

namespace kvc {

// glibc's read-write lock admits readers as long as other readers hold it. A few threads that submit in a tight loop
// would keep the transfer thread from ever ending a transfer. Here a waiting writer blocks new readers. A thread must
// not hold the shared lock twice.
class WriterFirstMutex {
 public:
  WriterFirstMutex() noexcept {
    pthread_rwlockattr_t attributes;
    pthread_rwlockattr_init(&attributes);
    pthread_rwlockattr_setkind_np(&attributes, PTHREAD_RWLOCK_PREFER_WRITER_NONRECURSIVE_NP);
    pthread_rwlock_init(&lock_, &attributes);
    pthread_rwlockattr_destroy(&attributes);
  }
  WriterFirstMutex(const WriterFirstMutex&) = delete;
  WriterFirstMutex& operator=(const WriterFirstMutex&) = delete;
  ~WriterFirstMutex() { pthread_rwlock_destroy(&lock_); }

  void lock() noexcept { pthread_rwlock_wrlock(&lock_); }
  void unlock() noexcept { pthread_rwlock_unlock(&lock_); }
  void lock_shared() noexcept { pthread_rwlock_rdlock(&lock_); }
  void unlock_shared() noexcept { pthread_rwlock_unlock(&lock_); }

 private:
  pthread_rwlock_t lock_;
};

}  // namespace kvc
