// Threads of a launch on the host. From pthreads: the C++ library's headers would be most of what a kernel takes to compile.
#pragma once

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

namespace po {

// Calls `body(i)` for each i below `count`, each in a thread of its own, body(0) in the caller's; returns behind them all.
template <class Body>
void run_threads(int count, const Body& body) {
  struct Thread {
    const Body* body;
    int index;
    pthread_t handle;
  };
  auto* threads = new Thread[static_cast<size_t>(count)];
  for (int i = 1; i < count; ++i) {
    threads[i] = {&body, i, {}};
    const auto start = [](void* given) -> void* {
      const auto* thread = static_cast<const Thread*>(given);
      (*thread->body)(thread->index);
      return nullptr;
    };
    if (pthread_create(&threads[i].handle, nullptr, start, &threads[i]) != 0) {
      perror("a thread of a kernel on the host");
      abort();
    }
  }
  body(0);
  for (int i = 1; i < count; ++i) pthread_join(threads[i].handle, nullptr);
  delete[] threads;
}

}  // namespace po
