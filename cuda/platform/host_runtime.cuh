// Host backend: C entry points to the state that Python keeps across launches.
#pragma once

#include <system_error>

#include "platform/host_network.h"
#include "platform/host_threads.h"

#define PO_EXPORT extern "C" __attribute__((visibility("default")))

// Returns null if the system has no room for its thread.
PO_EXPORT void* po_network_create(const uint64_t* peer_heaps, int world_size, uint64_t max_delay_us, uint64_t seed) {
  po::Patience patience;
  do {
    try {
      return static_cast<po::Network*>(new po::DelayedNetwork(peer_heaps, world_size, max_delay_us, seed));
    } catch (const std::system_error&) {
    }
  } while (patience.pause());
  return nullptr;
}

PO_EXPORT void po_network_destroy(void* network) { delete static_cast<po::Network*>(network); }

PO_EXPORT void po_network_quiet(void* network) { static_cast<po::Network*>(network)->quiet(); }

// For tests: see DelayedNetwork::Count.
PO_EXPORT void po_network_counts(void* network, uint64_t* counts) {
  static_cast<po::DelayedNetwork*>(static_cast<po::Network*>(network))->copy_counts(counts);
}
