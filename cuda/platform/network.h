// A host kernel's view of the network to PEs whose heaps it has not mapped. Compiled for the host alone.
#pragma once

#include <stdint.h>

namespace po {

class Network {
 public:
  virtual ~Network() = default;
  // Starts copying `bytes` to `offset` in the heap of `peer`.
  virtual void put(int peer, uint64_t offset, const void* source, uint64_t bytes) = 0;
  virtual void signal(int peer, uint64_t offset, uint64_t value) = 0;
  // Returns when the bytes have arrived.
  virtual void get(int peer, uint64_t offset, void* target, uint64_t bytes) = 0;
  // Orders operations so far before later ones, to each peer.
  virtual void fence() = 0;
  // Returns when all operations so far have been applied.
  virtual void quiet() = 0;
};

}  // namespace po
