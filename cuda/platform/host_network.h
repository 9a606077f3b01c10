// The host backend's stand-in for a network: a proxy thread per PE that applies puts late and out of order. Kernels see
// it as a Network; it is compiled once for all of them.
//
// Between two fences it picks the next operation at random, after a random delay. A fence orders operations of its own
// thread to the same peer only. Compiled for the host alone.
#pragma once

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

  void put(int peer, uint64_t offset, const void* source, uint64_t bytes) override {
    enqueue({peer, offset, source, bytes, 0, {}, 0});
  }

  void signal(int peer, uint64_t offset, uint64_t value) override { enqueue({peer, offset, nullptr, 0, value, {}, 0}); }

  // Overtakes pending operations, as a network may.
  void get(int peer, uint64_t offset, void* target, uint64_t bytes) override {
    if (max_delay_us_ != 0) usleep(static_cast<useconds_t>(max_delay_us_ / 8));
    std::memcpy(target, reinterpret_cast<const uint8_t*>(peer_heaps_[static_cast<size_t>(peer)]) + offset, bytes);
  }

  void fence() override {
    std::lock_guard lock(mutex_);
    ++generations_[std::this_thread::get_id()];
  }

  void quiet() override {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return pending_.empty() && !busy_; });
  }

 private:
  struct Operation {
    int peer;
    uint64_t offset;
    const void* source;  // null: a signal
    uint64_t bytes;
    uint64_t value;
    std::thread::id thread;
    uint64_t generation;  // number of fences that its thread has made before
  };

  void enqueue(Operation operation) {
    {
      std::lock_guard lock(mutex_);
      operation.thread = std::this_thread::get_id();
      operation.generation = generations_[operation.thread];
      pending_.push_back(operation);
    }
    changed_.notify_all();
  }

  // Any pending operation may be next unless an older generation of its thread to the same peer is pending.
  size_t choose() {
    oldest_.clear();
    for (const Operation& operation : pending_) {
      const auto found = oldest_.emplace(std::pair(operation.thread, operation.peer), operation.generation);
      if (operation.generation < found.first->second) found.first->second = operation.generation;
    }
    eligible_.clear();
    for (size_t i = 0; i < pending_.size(); ++i) {
      if (pending_[i].generation == oldest_[{pending_[i].thread, pending_[i].peer}]) eligible_.push_back(i);
    }
    return eligible_[random_() % eligible_.size()];
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
      const size_t index = choose();
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
    auto* target = reinterpret_cast<uint8_t*>(peer_heaps_[static_cast<size_t>(operation.peer)]) + operation.offset;
    if (operation.source == nullptr) {
      // Releases the puts that this thread has applied, as the target's memory would show them.
      flag_store_release_sys(reinterpret_cast<uint64_t*>(target), operation.value);
    } else {
      std::memcpy(target, operation.source, operation.bytes);
    }
  }

  const std::vector<uint64_t> peer_heaps_;
  std::map<std::thread::id, uint64_t> generations_;  // of each thread: its fences so far
  const uint64_t max_delay_us_;
  std::mt19937_64 random_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Operation> pending_;
  std::map<std::pair<std::thread::id, int>, uint64_t> oldest_;  // generation pending, of each thread to each peer
  std::vector<size_t> eligible_;
  bool busy_ = false;
  bool stopping_ = false;
  std::thread proxy_;
};

}  // namespace po
