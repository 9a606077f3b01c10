// The host backend's stand-in for a network: a proxy thread per PE that applies puts late and out of order. Kernels see
// it as a Network; it is compiled once for all of them.
//
// It picks the next operation at random, after a random delay. Compiled for the host alone.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "platform/memory.cuh"
#include "platform/network.h"

namespace po {

class DelayedNetwork final : public Network {
 public:
  // `peer_heaps`: where this process maps each PE's heap. `max_delay_us` = 0 keeps the reordering alone.
  DelayedNetwork(const uint64_t* peer_heaps, int world_size, uint64_t max_delay_us, uint64_t seed)
      : peer_heaps_(peer_heaps, peer_heaps + world_size),
        max_delay_us_(max_delay_us),
        random_(seed),
        proxy_([this] { run(); }) {}

  DelayedNetwork(const DelayedNetwork&) = delete;
  DelayedNetwork& operator=(const DelayedNetwork&) = delete;

  ~DelayedNetwork() override {
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    changed_.notify_all();
    proxy_.join();
  }

  void signal(int peer, uint64_t offset, uint64_t value) override {
    enqueue({peer, 0, nullptr, 0, offset, value}, kSignals);
  }

  void put_signal(int peer, uint64_t offset, const void* source, uint64_t bytes, uint64_t flag_offset,
                  uint64_t value) override {
    {
      std::lock_guard lock(mutex_);
      uint64_t& last = announced_[{peer, flag_offset}];
      if (last == value) ++counts_[kRepeats];
      last = value;
    }
    enqueue({peer, offset, source, bytes, flag_offset, value}, kPutSignals);
  }

  // Overtakes pending operations, as a network may.
  void get(int peer, uint64_t offset, void* target, uint64_t bytes) override {
    if (max_delay_us_ != 0) usleep(static_cast<useconds_t>(max_delay_us_ / 8));
    std::memcpy(target, reinterpret_cast<const uint8_t*>(peer_heaps_[static_cast<size_t>(peer)]) + offset, bytes);
  }

  void quiet() override {
    std::unique_lock lock(mutex_);
    ++counts_[kQuiets];
    changed_.wait(lock, [this] { return pending_.empty() && !busy_; });
  }

  // How many of each kind there have been: signals, puts with their signals (and among them, with what the same flag had
  // last), quiets.
  enum Count { kSignals, kPutSignals, kRepeats, kQuiets, kNumCounts };
  void copy_counts(uint64_t* counts) {
    std::lock_guard lock(mutex_);
    std::copy(counts_, counts_ + kNumCounts, counts);
  }

 private:
  struct Operation {
    int peer;
    uint64_t offset;
    const void* source;
    uint64_t bytes;
    uint64_t flag_offset;
    uint64_t value;
  };

  void enqueue(const Operation& operation, Count kind) {
    {
      std::lock_guard lock(mutex_);
      ++counts_[kind];
      pending_.push_back(operation);
    }
    changed_.notify_all();
  }

  void run() {
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return stopping_ || !pending_.empty(); });
      if (pending_.empty()) return;
      const uint64_t delay = max_delay_us_ == 0 ? 0 : random_() % max_delay_us_;
      if (delay != 0 && !stopping_) {
        lock.unlock();
        usleep(static_cast<useconds_t>(delay));
        lock.lock();
      }
      const size_t index = random_() % pending_.size();
      const Operation operation = pending_[index];
      pending_.erase(pending_.begin() + static_cast<ptrdiff_t>(index));
      busy_ = true;
      lock.unlock();
      apply(operation);
      lock.lock();
      busy_ = false;
      changed_.notify_all();
    }
  }

  void apply(const Operation& operation) {
    auto* heap = reinterpret_cast<uint8_t*>(peer_heaps_[static_cast<size_t>(operation.peer)]);
    if (operation.bytes != 0) std::memcpy(heap + operation.offset, operation.source, operation.bytes);
    // Releases the puts that this thread has applied, as the target's memory would show them.
    flag_store_release_sys(reinterpret_cast<uint64_t*>(heap + operation.flag_offset), operation.value);
  }

  const std::vector<uint64_t> peer_heaps_;
  const uint64_t max_delay_us_;
  std::mt19937_64 random_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Operation> pending_;
  uint64_t counts_[kNumCounts] = {};
  std::map<std::pair<int, uint64_t>, uint64_t> announced_;  // by peer and flag: the last value
  bool busy_ = false;
  bool stopping_ = false;
  std::thread proxy_;
};

}  // namespace po
