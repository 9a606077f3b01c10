// po::await for the tests, in a thread that does not run for a while after its last look.
#include <unistd.h>

#include <cstddef>

#include "comm/launch.cuh"

// PE 0 waits at most 50 ms for PE 1, whose flag comes while PE 0 is held up for longer, where `comes`. `lost`: the host then says
// that PE 1 has ended. Returns whether it came.
extern "C" __attribute__((visibility("default"))) int held_up(int comes, int lost) {
  po::LocalState local{};
  po::ErrorRecord error{};
  uint64_t host_says[2] = {};
  uint8_t heap[4096] = {};
  uint64_t peers[2] = {reinterpret_cast<uint64_t>(heap), reinterpret_cast<uint64_t>(heap)};
  po::Team team{};
  team.size = 2;
  team.heap = heap;
  team.peer_heaps = peers;
  team.abort_offset = 1024;
  team.local = &local;
  team.host_says = host_says;
  team.error = &error;
  team.timeout_ns = 50'000'000;
  team.epoch = 1;
  const int peer = 1;
  const uint64_t index = 0;
  int looks = 0;
  const auto look = [&](uint64_t* seen) {
    *seen = 0;
    const bool is_there = comes != 0 && looks >= 2;
    if (++looks == 2) {  // time counts since the first look
      usleep(100'000);
      if (lost != 0) host_says[peer] = po::kLost;
    }
    return is_there;
  };
  return po::await(team, po::kPhaseCredit, peer, index, look) && error.state == 0;
}
