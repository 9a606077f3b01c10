// A host kernel's view of the network to PEs whose heaps it has not mapped. Compiled for the host alone.
#pragma once

#include <stdint.h>

namespace po {

class Network {
 public:
  virtual ~Network() = default;
  virtual void signal(int peer, uint64_t offset, uint64_t value) = 0;
  // Starts copying `bytes` to `offset` in the heap of `peer`, and sets the flag at `flag_offset` once they have arrived.
  virtual void put_signal(int peer, uint64_t offset, const void* source, uint64_t bytes, uint64_t flag_offset,
                          uint64_t value) = 0;
  // Returns when the bytes have arrived.
  virtual void get(int peer, uint64_t offset, void* target, uint64_t bytes) = 0;
  // Returns when all operations so far have been applied.
  virtual void quiet() = 0;
};

}  // namespace po
