// platform/host_threads.h for the tests, on a system that refuses threads.
#include <errno.h>
#include <pthread.h>
#include <unistd.h>

static int accepted, refusals;  // threads that are created first; then so many that are not
static long paused_us;

static int create(pthread_t* handle, const pthread_attr_t* attributes, void* (*start)(void*), void* given) {
  if (accepted-- > 0 || refusals-- <= 0) return pthread_create(handle, attributes, start, given);
  return EAGAIN;
}

static int pause_for(useconds_t us) {
  paused_us += us;
  return 0;
}

#define pthread_create create
#define usleep pause_for
#include "platform/host_threads.h"
#undef pthread_create
#undef usleep

// Runs `count` bodies that wait for one another; `calls` has how often each was called. Returns the microseconds of pauses, below
// 0 where none was called.
extern "C" __attribute__((visibility("default"))) long run(int count, int first_accepted, int then_refused,
                                                           int* calls) {
  accepted = first_accepted;
  refusals = then_refused;
  paused_us = 0;
  pthread_barrier_t all;
  pthread_barrier_init(&all, nullptr, static_cast<unsigned>(count));
  const bool has_run = po::run_threads(count, [&](int i) {
    ++calls[i];
    pthread_barrier_wait(&all);
  });
  pthread_barrier_destroy(&all);
  return has_run ? paused_us : -paused_us;
}
