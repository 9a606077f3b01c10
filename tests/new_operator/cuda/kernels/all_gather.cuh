// All-gather: every PE gets every PE's tensor, one behind the other. Each PE pushes: a WG stores its piece of the PE's own
// tensor into all outputs, which lie in the symmetric heap.
//
//   sender's WG i                              receiver
//   store the piece into the own output        grant credit: its output may be written, and where it lies
//   await credit                      <-----
//   store the piece into its output   ----->
//   sync; release sliceRdy word i     ----->   WG i awaits that word of every sender
//
// A peer that is not reachable gets the piece by a put from the own output, which has it already. cuda/DESIGN.md says
// why this is enough, from "One launch" on; the tags are of tests/test_all_gather.py, where a mutation takes each of them out.
#pragma once

#include "comm/launch.cuh"
#include "platform/entry.cuh"

namespace po::all_gather {

inline constexpr int kThreads = 256;  // on the GPU
inline constexpr Phase kPhasePiece = make_phase(kFirstPhase);
PO_CONSTANT(kThreads)
PO_CONSTANT(kPhasePiece)

struct Config {
  int vector_bytes = 16;  // of one load or store: every tensor begins at a multiple of it, and ends at one
};

struct Plan {
  Team team;
  int64_t part_bytes;  // of each PE's tensor
};
PO_DESCRIBE(Plan, team, part_bytes)

struct Call {
  const uint8_t* x;
  uint64_t output_offset;  // of [size][part_bytes] in this PE's heap
};
PO_DESCRIBE(Call, x, output_offset)

struct Shared {
  Plan plan;
  uint64_t is_last;
};

// What a WG has of the PE's own tensor, on its way to all outputs.
template <Config kConfig>
class Piece {
 public:
  PO_FN Piece(const WorkGroup& wg, const Plan& plan, const Call& call)
      : wg_(wg), team_(plan.team), x_(call.x), output_(call.output_offset), part_(plan.team.rank * plan.part_bytes) {
    const int64_t vectors = plan.part_bytes / kBytes;
    begin_ = vectors * wg.index() / wg.count() * kBytes;
    end_ = vectors * (wg.index() + 1) / wg.count() * kBytes;
  }

  PO_FN void store_own() const { store(team_.rank, output_); }

  // Behind their credit. Each PE begins with another peer, so that not all store to the same one.
  PO_FN void store_to_peers() const {
    for (int hop = 1; hop < team_.size; ++hop) {
      const int peer = (team_.rank + hop) % team_.size;
      if (is_reachable(team_, peer)) store(peer, granted_output(team_, peer));
    }
  }

  // Puts it to peers that are not reachable, and tells all of them that it is there: one thread per peer.
  PO_FN void send() const {
    bool has_put = false;
    for (int peer = wg_.rank(); peer < team_.size; peer += wg_.size()) {
      if (peer == team_.rank) continue;
      if (!is_reachable(team_, peer)) {
        const uint8_t* source = team_.heap + output_ + place();
        fence_acq_rel_sys();  // what all threads have stored into it, behind the sync, is out for the network
        put_nbi(team_, peer, granted_output(team_, peer) + place(), source, static_cast<uint64_t>(end_ - begin_));
        put_fence(team_);  // @piece-fence
        has_put = true;
      }
      signal(team_, peer, ready_word_offset(team_, team_.rank, word()), launch_flag(team_));
    }
    if (has_put) put_quiet(team_);  // @piece-quiet: the output is the caller's when the launch has ended
  }

  PO_FN void await_those_of_peers() const {
    for (int peer = wg_.rank(); peer < team_.size; peer += wg_.size()) {
      if (peer == team_.rank) continue;
      await_epoch(team_, local_word(team_, ready_word_offset(team_, peer, word())), kPhasePiece, peer, word());
    }
  }

 private:
  static constexpr int kBytes = kConfig.vector_bytes;

  PO_FN uint64_t word() const { return static_cast<uint64_t>(wg_.index()); }
  PO_FN uint64_t place() const { return static_cast<uint64_t>(part_ + begin_); }  // in every output

  PO_FN void store(int pe, uint64_t output) const {
    const TaskTrace trace(pe != team_.rank);
    uint8_t* part = peer_address(team_, pe, output) + part_;
    for (int64_t i = begin_ + wg_.rank() * kBytes; i < end_; i += wg_.size() * kBytes) {
      store_vector<kBytes>(part + i, load_vector<kBytes>(x_ + i));
    }
  }

  const WorkGroup& wg_;
  const Team& team_;
  const uint8_t* x_;
  const uint64_t output_;
  const int64_t part_;  // where that of this PE begins in an output
  int64_t begin_;       // in the part
  int64_t end_;
};

template <Config kConfig>
struct Kernel {
  using Plan = all_gather::Plan;
  using Call = all_gather::Call;
  using Shared = all_gather::Shared;
  static constexpr int kThreads = all_gather::kThreads;
  static constexpr int kBlocksPerSm = 1;

  static PO_FN void run(const WorkGroup& wg, Shared& shared, const Call& call) {
    Team& team = shared.plan.team;
    begin_launch(team, wg);
    if (wg.index() == 0) grant_credit(team, wg, call.output_offset);
    const Piece<kConfig> piece(wg, shared.plan, call);
    piece.store_own();            // which hides some of the wait
    await_all_credits(team, wg);  // @piece-credits
    wg.sync();                    // @piece-credits-sync: threads share the peers, and each stores to all of them
    // A thread that finds the launch given up leaves its share out; behind the sync all of them know, and tell nobody.
    if (!is_aborted(team)) piece.store_to_peers();
    wg.sync();  // @piece-stored
    if (!is_aborted(team)) piece.send();
    piece.await_those_of_peers();  // @piece-await
    const int64_t output_bytes = team.size * shared.plan.part_bytes;
    leave_launch(team, wg, &shared.is_last, call.output_offset, static_cast<uint64_t>(output_bytes));
  }
};

}  // namespace po::all_gather
