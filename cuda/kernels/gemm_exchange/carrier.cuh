// The carriers: warps that send what others have staged, and await what peers send.
//
// A host WG with fewer than three threads has none. There the thread that multiplies does their work.
#pragma once

#include "comm/credits.cuh"
#include "comm/team.cuh"
#include "tile/product_loop.cuh"

namespace po::gemm_exchange {

enum class Exchange { kAllToAll, kReduceScatter, kAllReduce };

inline constexpr int kCarriers = PO_ON_DEVICE ? 3 : 1;  // warps of a WG
inline constexpr int kSlots = 2;                        // of staged tiles of a WG
inline constexpr int kBatch = 4;                        // vectors of a lane that a carrier stores together
inline constexpr Phase kPhasePartials = make_phase(kFirstPhase);
// A PE that owes rows may itself wait for a third one's credit or partial sums: so that one's lateness shows first.
inline constexpr Phase kPhaseRows = make_phase(kFirstPhase + 1, 9);
PO_CONSTANT(kPhasePartials)
PO_CONSTANT(kPhaseRows)
PO_CONSTANT(kSlots)
PO_CONSTANT(kBatch)
PO_QUERY(carriers, (int64_t on_device), on_device != 0 ? 3 : 1)

struct Plan {
  Team team;
  uint64_t partials_offset;  // in every heap: [senders, without this PE][blocks of a part], of partial sums
  uint64_t flags_offset;     // in every heap: uint64_t[size][blocks of a part][kCarriers]
  int64_t blocks_per_part;
  uint8_t* slots;        // [WGs][kSlots], of tiles on their way; private
  int64_t batch_cycles;  // at least so many from one batch of a carrier's stores to the next, beside a product
};
PO_DESCRIBE(Plan, team, partials_offset, flags_offset, blocks_per_part, slots, batch_cycles)

struct Call {
  Product product;
  uint8_t* output;         // in this PE's heap where peers store to it
  uint64_t output_offset;  // there
  const uint8_t* bias;
  const uint8_t* residual;  // as the output
  int64_t columns;          // of the output
  int64_t row_bytes;        // of the output
  const LocalState* local;  // the team's; `begin` needs it before the plan is there
  float scale;              // of the mean: 1 / PEs
};
PO_DESCRIBE(Call, product, output, output_offset, bias, residual, columns, row_bytes, local, scale)

// What the warps of a WG hand to each other.
struct Slots {
  Handover staged[kSlots];  // a tile lies in its slot, or a result in the output
  Handover sent[kSlots];
  Handover
      there[kSlots];  // the peers' partial sums of a tile, or the credit for a tile that is stored to a peer directly
  Handover taken[kSlots];

  // Where a warp has come to.
  class Turn {
   public:
    PO_FN int slot() const { return slot_; }
    PO_FN uint32_t round() const { return round_; }
    PO_FN bool is_first() const { return slot_ == 0 && round_ == 0; }
    PO_FN void advance() {
      if (++slot_ < kSlots) return;
      slot_ = 0;
      ++round_;
    }

   private:
    int slot_ = 0;
    uint32_t round_ = 0;
  };

  // One thread; a sync of the WG must follow.
  PO_FN void start(int multiplying_warps) {
    for (int i = 0; i < kSlots; ++i) {
      staged[i].start(multiplying_warps);
      sent[i].start(kCarriers);
      there[i].start(kCarriers);
      taken[i].start(multiplying_warps);
    }
  }
};

struct Shared {
  Plan plan;
  uint64_t is_missing;  // 1: something did not come from a peer
  uint8_t* peer_place;  // where the last tile is stored at a peer; null: nowhere
  Slots slots;
};

// What a WG finishes of a tile.
struct Block {
  int pe;          // whose rows these are
  int64_t number;  // among the blocks of that PE's part
  int row;         // the first one, in the part
  int rows;        // that exist
  int column;
  int columns;  // that exist
};

template <Exchange kExchange, class Product_, class Element_, class Wire_>
struct ExchangeTraits {
  using Product = Product_;
  using Tile = typename Product::Tile;
  using Element = Element_;
  using Wire = Wire_;
  static constexpr bool kAdds = kExchange != Exchange::kAllToAll;
  static constexpr bool kReturns = kExchange == Exchange::kAllReduce;  // results to all peers
  static constexpr bool kSendsRows = kExchange != Exchange::kReduceScatter;
  static constexpr int kSlotRowBytes =
      Tile::kFinishedColumns * static_cast<int>(kAdds ? sizeof(typename Wire::Storage) : 2);
  static constexpr int64_t kSlotBytes = static_cast<int64_t>(Tile::kFinishedRows) * kSlotRowBytes;

  // `first_part`: whose tiles come first on the PE that makes them.
  static PO_FN Block block_of(const Call& call, const ProductPosition<Product>& at, int first_part) {
    const ProductTiles& tiles = call.product.tiles;
    const ProductTiles::Place place = tiles.place_of(at.number());
    ProductRows all_rows = call.product.rows;
    all_rows.first_part = first_part;
    const ProductRows::Place rows = all_rows.place_of(place.row * Product::kSharing + at.sharer(), Tile::kRows);
    const int part = at.part(), column = place.column * Tile::kColumns + Tile::first_column(part);
    const int64_t number = (static_cast<int64_t>(rows.number) * tiles.columns + place.column) * Product::kParts + part;
    return {rows.part,
            number,
            rows.row_of_part + Tile::first_row(part),
            min_of(rows.count - Tile::first_row(part), Tile::kFinishedRows),
            column,
            static_cast<int>(call.columns) - column};
  }
  static PO_FN Block block_of(const Call& call, const ProductPosition<Product>& at) {
    return block_of(call, at, call.product.rows.first_part);
  }

  static PO_FN uint8_t* slot(const Plan& plan, const WorkGroup& wg, int slot) {
    return plan.slots + (static_cast<int64_t>(wg.index()) * kSlots + slot) * kSlotBytes;
  }

  // Where partial sums of a block lie in the heap of the PE that adds them up.
  static PO_FN uint64_t partial_offset(const Plan& plan, int sender, int receiver, const Block& block) {
    const int64_t place = sender < receiver ? sender : sender - 1;
    return plan.partials_offset + static_cast<uint64_t>((place * plan.blocks_per_part + block.number) * kSlotBytes);
  }

  // Where a block lies in the output of the PE that it belongs to. All-to-all: the rows of this PE come at its rank.
  // All-reduce: all outputs have all parts.
  static PO_FN int64_t output_place(int sender, const Call& call, const Block& block) {
    const ProductRows& rows = call.product.rows;
    const int64_t part_rows = static_cast<int64_t>(rows.segments) * rows.segment_rows;
    const int64_t first = kReturns ? block.pe * part_rows : kSendsRows ? sender * part_rows : 0;
    return (first + block.row) * call.row_bytes + block.column * 2;
  }
};

template <class Traits>
class Carrier {
  using Product = typename Traits::Product;
  using Tile = typename Traits::Tile;
  static constexpr int kResultRowBytes = Tile::kFinishedColumns * 2;

 public:
  PO_FN Carrier(const WorkGroup& wg, Shared& shared, const Call& call)
      : wg_(wg), shared_(shared), plan_(shared.plan), team_(shared.plan.team), call_(call) {
    number_ = wg.warp_index() - (PO_ON_DEVICE ? wg.num_warps() - kCarriers : Tile::num_warps(wg) + 1);
  }

  PO_FN const WorkGroup& wg() const { return wg_; }
  PO_FN bool is_inline() const { return !PO_ON_DEVICE && wg_.size() < 3; }
  PO_FN bool carries() const { return number_ >= 0; }

  // Grants credit, and closes the epoch: no WG counts itself out at the end. All threads of the WG know the epoch.
  PO_FN void begin() const {
    if (share() != 0) return;
    if (wg_.index() == 0) grant_credit(team_, warp_, call_.output_offset);
    if (warp_.rank() == 0) close_epoch(team_, wg_);
  }

  // Does all that is there to do.
  PO_FN void run() {
    const ProductTiles& tiles = call_.product.tiles;
    Slots::Turn sent, received;
    begin();
    for (ProductPosition<Product> at(wg_, tiles); !at.is_over(tiles); at.skip_tile()) {
      const Block block = Traits::block_of(call_, at);
      if (block.rows <= 0) continue;
      is_paced_ = !at.is_last(tiles);
      if (block.pe != team_.rank) {
        if (!is_paced_ && received.is_first()) {  // the WG has no tile of the own part
          open(block);
          shared_.slots.staged[sent.slot()].await(sent.round());  // @carrier-stored
          if (Traits::kAdds && shared_.peer_place != nullptr) tell(block);
          continue;
        }
        shared_.slots.staged[sent.slot()].await(sent.round());  // @carrier-staged
        send(block, Traits::slot(plan_, wg_, sent.slot()));
        has_sent(sent);
        continue;
      }
      if constexpr (Traits::kAdds) {
        await_partials(block);                                             // @partials-await
        shared_.slots.taken[received.slot()].await(received.round() - 1);  // a round at a time
        hand_over(shared_.slots.there[received.slot()]);                   // @partials-told
        received.advance();
      }
      if constexpr (Traits::kReturns) {
        shared_.slots.staged[sent.slot()].await(sent.round());  // @carrier-result
        send_result(block);
        has_sent(sent);
      }
    }
    end();
  }

  // Sends a staged tile to the PE that its rows belong to.
  PO_FN void send(const Block& block, const uint8_t* slot) {
    if (!may_store_to(block.pe)) return;
    if constexpr (Traits::kAdds) {
      constexpr int kRowBytes = Traits::kSlotRowBytes;
      const int rows = ceil_div(block.rows, Tile::kPieceRows) * Tile::kPieceRows;
      copy<kRowBytes>(slot, kRowBytes, place_at(block.pe, block), kRowBytes, rows, kRowBytes);  // @partials-before-flag
      tell(block);
    } else {
      // @tile-rows-before-word
      copy<kResultRowBytes>(slot, kResultRowBytes, place_at(block.pe, block), call_.row_bytes, block.rows,
                            block.columns * 2);
    }
  }

  // Sends a result to all peers.
  PO_FN void send_result(const Block& block) {
    const uint8_t* result = call_.output + Traits::output_place(team_.rank, call_, block);
    for (int hops = 1; hops < team_.size; ++hops) {
      const int pe = (team_.rank + hops) % team_.size;
      if (!may_store_to(pe)) continue;
      const int row_bytes = block.columns * 2;
      copy<kResultRowBytes>(result, call_.row_bytes, output_at(pe, block), call_.row_bytes, block.rows, row_bytes);
    }
  }

  // Returns when this carrier's share of all peers' partial sums has come.
  PO_FN void await_partials(const Block& block) {
    bool all = true;
    for (int pe = warp_.rank(); pe < team_.size; pe += warp_.size()) {
      if (pe == team_.rank) continue;
      const auto index = static_cast<uint64_t>(block.number);
      all = await_epoch(team_, local_word(team_, flag_offset(pe, block)), kPhasePartials, pe, index) && all;
    }
    if (!all) miss();  // @partials-missing
  }

  // After the last tile: tells all peers that their rows have been sent, and awaits those of all peers.
  PO_FN void end() {
    if constexpr (Traits::kSendsRows) {
      warp_.sync();
      const auto word = static_cast<uint64_t>(wg_.index() * kCarriers + share());
      for (int pe = warp_.rank(); pe < team_.size; pe += warp_.size()) {
        if (pe == team_.rank || is_aborted(team_)) continue;  // @tile-rows-unless-aborted
        signal(team_, pe, ready_word_offset(team_, team_.rank, word), launch_flag(team_));
      }
      for (int pe = warp_.rank(); pe < team_.size; pe += warp_.size()) {
        if (pe == team_.rank) continue;
        const uint64_t* sent = local_word(team_, ready_word_offset(team_, pe, word));
        if (!await_epoch(team_, sent, kPhaseRows, pe, word)) miss();  // @tile-rows-await
      }
    }
    if (wg_.index() == 0 && share() == 0) await_all_credits(team_, warp_);  // @exchange-credits
  }

 private:
  PO_FN int share() const { return max_of(number_, 0); }  // which of the shares of a tile

  // Whether this launch has the peer's credit, for which it waits. If not, it has been given up.
  PO_FN bool may_store_to(int pe) {
    if (!credits_.await(team_, warp_, pe)) return false;  // @exchange-credit
    return warp_.count(is_aborted(team_)) == 0;           // @exchange-takes-part
  }

  // Lets others store a tile to a peer directly.
  PO_FN void open(const Block& block) {
    const bool may = may_store_to(block.pe);  // @peer-credit
    if (share() == 0 && warp_.rank() == 0) shared_.peer_place = may ? place_at(block.pe, block) : nullptr;
    hand_over(shared_.slots.there[0]);  // @peer-open
  }

  // Tells a peer that partial sums have been stored there.
  PO_FN void tell(const Block& block) const {
    warp_.sync();
    if (warp_.rank() == 0) signal(team_, block.pe, flag_offset(team_.rank, block), launch_flag(team_));
  }

  PO_FN void miss() const { flag_store_relaxed_wg(&shared_.is_missing, 1); }

  // Where a block is stored at a peer.
  PO_FN uint8_t* place_at(int pe, const Block& block) const {
    if constexpr (Traits::kAdds) return peer_address(team_, pe, Traits::partial_offset(plan_, team_.rank, pe, block));
    return output_at(pe, block);
  }
  PO_FN uint8_t* output_at(int pe, const Block& block) const {
    return peer_address(team_, pe, granted_output(team_, pe)) + Traits::output_place(team_.rank, call_, block);
  }

  PO_FN uint64_t flag_offset(int sender, const Block& block) const {
    const int64_t number = (sender * plan_.blocks_per_part + block.number) * kCarriers + share();
    return plan_.flags_offset + static_cast<uint64_t>(number) * sizeof(uint64_t);
  }

  PO_FN void has_sent(Slots::Turn& turn) const {
    hand_over(shared_.slots.sent[turn.slot()]);  // @tile-sent
    turn.advance();
  }

  // Returns when the links take another batch.
  PO_FN void keep_pace() {
    await_cycles(last_batch_, static_cast<uint32_t>(plan_.batch_cycles));
    last_batch_ = clock_cycles();
  }

  // Copies this carrier's share of some rows of a block, of which so many bytes exist.
  template <int kRowBytes>
  PO_FN void copy(const uint8_t* source, int64_t source_stride, uint8_t* target, int64_t target_stride, int rows,
                  int row_bytes) {
    constexpr int kUnits = kRowBytes / 16;
    const int carriers = is_inline() ? 1 : kCarriers;
    const int begin = rows * share() / carriers * kUnits, end = rows * (share() + 1) / carriers * kUnits;
    PO_NO_UNROLL
    for (int first = begin + warp_.rank(); first < end; first += kBatch * warp_.size()) {
      Vector<16> values[kBatch];
      PO_UNROLL
      for (int j = 0; j < kBatch; ++j) {
        const int i = min_of(first + j * warp_.size(), end - 1), byte = min_of(i % kUnits * 16, row_bytes - 16);
        values[j] = load_shared_vector<16>(source + i / kUnits * source_stride + byte);
      }
      if (is_paced_) keep_pace();
      PO_UNROLL
      for (int j = 0; j < kBatch; ++j) {
        const int i = first + j * warp_.size(), byte = i % kUnits * 16;
        if (i < end && byte < row_bytes) store_vector<16>(target + i / kUnits * target_stride + byte, values[j]);
      }
    }
  }

  const WorkGroup& wg_;
  const Warp warp_{};
  Shared& shared_;
  const Plan& plan_;
  const Team& team_;
  const Call& call_;
  Credits credits_;
  int number_;
  // Whether others of this WG multiply meanwhile. What they load waits behind stores that the links do not take yet.
  bool is_paced_ = false;
  uint32_t last_batch_ = 0;  // when it was stored
};

}  // namespace po::gemm_exchange
