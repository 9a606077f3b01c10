// Threads of a launch on the host. They use pthreads: the C++ library's headers would dominate the time to compile a
// kernel.
#pragma once

#include <fenv.h>
#include <pthread.h>
#include <stddef.h>
#include <unistd.h>

namespace po {

// Waits for the system to have room for threads: pauses that grow, and add up to four seconds.
class Patience {
 public:
  // Returns false if no patience is left.
  bool pause() {
    if (next_us_ > kLongestUs) return false;
    usleep(static_cast<useconds_t>(next_us_));
    next_us_ *= 2;
    return true;
  }

 private:
  static constexpr int kLongestUs = 2048 * 1000;
  int next_us_ = 1000;
};

// Arithmetic as on GPUs, in this thread and in those that it creates, which inherit its modes: rounding to nearest, and
// with denormal numbers, whatever the caller has set (torch.set_flush_denormal).
class DeviceArithmetic {
 public:
  DeviceArithmetic() {
    fegetenv(&callers_);
    fesetenv(FE_DFL_ENV);
  }
  ~DeviceArithmetic() { fesetenv(&callers_); }
  DeviceArithmetic(const DeviceArithmetic&) = delete;
  DeviceArithmetic& operator=(const DeviceArithmetic&) = delete;

 private:
  fenv_t callers_;
};

// Calls `body(i)` for each i below `count`, each in a thread of its own, body(0) in the caller's, and returns after all
// of them. Bodies wait for one another, so none is called before all threads exist. Returns false if the threads cannot
// be created.
template <class Body>
[[nodiscard]] bool run_threads(int count, const Body& body) {
  struct Gate {
    pthread_mutex_t mutex;  // held by the caller until it is known whether the bodies will be called
    bool is_open;
  };
  struct Thread {
    const Body* body;
    Gate* gate;
    int index;
    pthread_t handle;
  };
  const DeviceArithmetic arithmetic;
  Gate gate{PTHREAD_MUTEX_INITIALIZER, false};
  auto* threads = new Thread[static_cast<size_t>(count)];
  const auto start = [](void* given) -> void* {
    const auto* thread = static_cast<const Thread*>(given);
    pthread_mutex_lock(&thread->gate->mutex);
    const bool is_open = thread->gate->is_open;
    pthread_mutex_unlock(&thread->gate->mutex);
    if (is_open) (*thread->body)(thread->index);
    return nullptr;
  };
  pthread_mutex_lock(&gate.mutex);
  Patience patience;
  int created = 1;
  while (created < count) {
    Thread& thread = threads[created];
    thread = {&body, &gate, created, {}};
    if (pthread_create(&thread.handle, nullptr, start, &thread) == 0) {
      ++created;
    } else if (!patience.pause()) {
      break;
    }
  }
  gate.is_open = created == count;
  pthread_mutex_unlock(&gate.mutex);
  if (gate.is_open) body(0);
  for (int i = 1; i < created; ++i) pthread_join(threads[i].handle, nullptr);
  pthread_mutex_destroy(&gate.mutex);
  delete[] threads;
  return gate.is_open;
}

}  // namespace po
