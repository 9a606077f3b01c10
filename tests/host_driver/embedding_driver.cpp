// Runs the host build of embedding_all_to_all with all PEs as threads of one process, launch after launch, and checks
// every output. Built with -fsanitize=thread: all PEs share one address space, so a missing release, acquire, sync or
// credit is a data race in it, also where the values happen to be right.
//
// Between two launches a PE reads its output and overwrites it with plain accesses, as a user's next operators would.
// exits.h says how it ends.

#include <algorithm>
#include <atomic>
#include <barrier>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "driver.h"
#include "kernels/embedding_all_to_all.cuh"

namespace {

using driver::fail;
using po::embedding_all_to_all::Call;
using po::embedding_all_to_all::Config;
using Kernel = po::embedding_all_to_all::Kernel<Config{.shapes = 3, .rows_in_flight = 4}>;
using po::embedding_all_to_all::Plan;
using po::embedding_all_to_all::Table;

constexpr int kNumRows = 37;              // of every table
constexpr uint32_t kStale = 0x7b7b7b7bu;  // what an output holds before its launch
constexpr uint32_t kAborted = 0xffffffffu;
constexpr uint8_t kGuard = 0xa5;
constexpr uint64_t kGuardBytes = 128;
constexpr uint64_t kReadyStride = 64;

// ---- options --------------------------------------------------------------------------------------------------------

driver::Options options({{"--tables", "2,2"},        // tables of each PE; as many entries as there are PEs
                         {"--batch", "5,4"},         // samples of each PE
                         {"--dims", "wide"},         // wide: rows of whole vectors; odd: any width
                         {"--wgs", "1"},             // WGs per launch
                         {"--threads", "1"},         // threads per WG
                         {"--slice", "2"},           // samples per slice
                         {"--epochs", "6"},          // launches
                         {"--first-epoch", "1"},     // epoch of the first launch
                         {"--schedule", "aware"},    // aware | oblivious
                         {"--local-delay", "0"},     // rounds; -1 for all
                         {"--transport", "direct"},  // direct | staged | mixed: PEs of equal parity reach each other
                         {"--delay-us", "0"},        // longest delay of an operation of the network
                         {"--slow-pes", ""},  // the first sleeps before each of its launches, the second twice as long
                         {"--slow-us", "0"},  // between half of this and this
                         {"--heavy-pe", "-1"},       // has huge bags
                         {"--timeout-ms", "60000"},  // of one wait; if there is trouble, from then on until recovery
                         {"--patient-pe", "-1"},     // waits ten times as long
                         {"--stop-pe", "-1"},        // does not launch at ...
                         {"--late-pe", "-1"},        // does not launch before all others have given up at ...
                         {"--mismatch-pe", "-1"},    // launches under another contract at ...
                         {"--in-turn", ""},          // PEs that launch when the one before has left, at ...
                         {"--trouble-at", "-1"},     // ... this launch (from 0); then all recover and go on
                         {"--queued", "0"},  // launches behind that one that look at no errors, as in a GPU's queue
                         {"--expect-reported", "-1"}});  // leaves because a peer gave up, not by its own time-out

// ---- data: pure functions of (PE, table, place, launch), so that every PE can compute what another sends ------------

uint64_t mix(std::initializer_list<int64_t> values) {
  uint64_t x = 0x9e3779b97f4a7c15ull;
  for (const int64_t value : values) {
    x ^= static_cast<uint64_t>(value);
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ x >> 27) * 0x94d049bb133111ebull;
    x ^= x >> 31;
  }
  return x;
}

// Small integers: sums are exact in fp32.
float table_value(int pe, int64_t table, int64_t row, int64_t column) {
  return static_cast<float>(static_cast<int>(mix({1, pe, table, row, column}) % 201) - 100);
}

int64_t row_of(int pe, int64_t table, int64_t bag, int64_t place, int64_t launch) {
  return static_cast<int64_t>(mix({2, pe, table, bag, place, launch}) % kNumRows);
}

struct World {
  const driver::Options& options;
  std::vector<int64_t> tables = options.list("--tables");
  std::vector<int64_t> batch = options.list("--batch");
  int size = static_cast<int>(tables.size());
  std::vector<int64_t> batch_start = std::vector<int64_t>(static_cast<size_t>(size) + 1, 0);
  std::vector<int64_t> column_start = std::vector<int64_t>(static_cast<size_t>(size) + 1, 0);  // bytes
  std::vector<uint8_t*> heaps = std::vector<uint8_t*>(static_cast<size_t>(size));
  std::vector<uint64_t> epochs = std::vector<uint64_t>(static_cast<size_t>(size));  // for recovery
  std::barrier<> meeting{size};
  driver::Meeting start{size};  // of a launch that somebody stays away from
  std::vector<std::atomic<bool>> has_left =
      std::vector<std::atomic<bool>>(static_cast<size_t>(size));  // the launch with the trouble

  explicit World(const driver::Options& options_in) : options(options_in) {
    if (batch.size() != tables.size() || tables.empty())
      fail(driver::kBadOption, "--tables and --batch need one entry per PE");
    std::partial_sum(batch.begin(), batch.end(), batch_start.begin() + 1);
    for (int pe = 0; pe < size; ++pe) {
      int64_t bytes = 0;
      for (int64_t t = 0; t < tables[pe]; ++t) bytes += 4 * dim(pe, t);
      column_start[pe + 1] = column_start[pe] + bytes;
    }
  }

  bool is_odd() const { return options.text("--dims") == "odd"; }

  int64_t dim(int pe, int64_t table) const {
    constexpr int64_t kWide[] = {4, 36, 8};  // 36: more than one pass over the row
    constexpr int64_t kOdd[] = {1, 3, 10};
    return (is_odd() ? kOdd : kWide)[(pe + table) % 3];
  }

  int64_t bag_length(int pe, int64_t table, int64_t bag, int64_t launch) const {
    if (pe == options.number("--heavy-pe")) return 400;
    const uint64_t drawn = mix({3, pe, table, bag, launch});
    return drawn % 11 == 0 ? 30 : static_cast<int64_t>(drawn % 4);  // empty ones as well
  }

  bool are_reachable(int a, int b) const {
    const std::string& transport = options.text("--transport");
    return a == b || transport == "direct" || (transport == "mixed" && a % 2 == b % 2);
  }

  int64_t row_bytes() const { return column_start.back(); }
};

// ---- one PE ---------------------------------------------------------------------------------------------------------

class Pe {
 public:
  Pe(World& world, int rank) : world_(world), rank_(rank) {
    build_tables();
    lay_out_heap();
    fill_plan();
    local_.epoch = static_cast<uint64_t>(world.options.number("--first-epoch")) - 1;
  }

  // After all PEs are made: they know each other's heaps now.
  void connect() {
    std::vector<uint64_t> all;
    for (int pe = 0; pe < world_.size; ++pe) {
      all.push_back(reinterpret_cast<uint64_t>(world_.heaps[pe]));
      peer_heaps_.push_back(world_.are_reachable(rank_, pe) ? all.back() : 0);
    }
    plan_.team.peer_heaps = peer_heaps_.data();
    const auto delay_us = static_cast<uint64_t>(world_.options.number("--delay-us"));
    network_ = std::make_unique<po::DelayedNetwork>(all.data(), world_.size, delay_us, rank_ + 1);
    plan_.team.network = network_.get();
  }

  void run() {
    const driver::Options& options = world_.options;
    for (int64_t launch = 0; launch < options.number("--epochs"); ++launch) {
      const bool is_trouble = launch == options.number("--trouble-at");
      set_timeout(is_trouble);
      const bool is_stopped = is_trouble && rank_ == options.number("--stop-pe");
      const bool has_late_pe = is_trouble && options.number("--late-pe") >= 0;
      // Who is there must not be taken for the one that is not.
      if (has_late_pe || (is_trouble && options.number("--stop-pe") >= 0)) world_.start.arrive_and_wait();
      nap(launch);
      if (is_trouble) await_turn();
      const bool is_late = has_late_pe && rank_ == options.number("--late-pe");
      if (is_late) world_.meeting.arrive_and_wait();
      if (!is_stopped) run_kernel(launch, is_trouble);
      if (is_trouble) world_.has_left[static_cast<size_t>(rank_)].store(true, std::memory_order_relaxed);
      if (is_trouble) {
        for (int64_t i = 1; i <= options.number("--queued") && !is_stopped; ++i) run_kernel(launch + i, false);
        check_trouble(launch);
        if (has_late_pe && !is_late) world_.meeting.arrive_and_wait();
        recover();
      } else {
        if (error_.state != 0) fail_with_record(driver::exit_of_aborted(error_), launch);
        check_output(launch);
      }
      for (const uint64_t output : outputs_) fill_output(output);
    }
  }

  // Delivers what is still under way. Other PEs' heaps are there until all PEs are closed.
  void close() { network_.reset(); }

  void check_remains() const {
    for (const uint64_t offset : guards_) {
      for (uint64_t i = 0; i < kGuardBytes; ++i) {
        if (heap_[offset + i] != kGuard) {
          fail(driver::kWrongRemains, "PE %d: a write outside the buffers, at heap offset %lu", rank_, offset + i);
        }
      }
    }
    for (const uint64_t word : wg_done_) {
      if (word != 0) fail(driver::kWrongRemains, "PE %d: a WG_Done word is not zero after the launches", rank_);
    }
  }

 private:
  void build_tables() {
    const bool is_odd = world_.is_odd();
    int64_t column = world_.column_start[rank_];
    for (int64_t t = 0; t < world_.tables[rank_]; ++t) {
      const int64_t dim = world_.dim(rank_, t);
      std::vector<float> rows;
      for (int64_t r = 0; r < kNumRows; ++r) {
        for (int64_t c = 0; c < dim; ++c) rows.push_back(table_value(rank_, t, r, c));
      }
      rows_.push_back(std::move(rows));
      const auto shape = is_odd ? po::embedding_all_to_all::kElementwise : po::embedding_all_to_all::kLanes32x2;
      tables_.push_back({reinterpret_cast<const uint8_t*>(rows_.back().data()), kNumRows, 4 * dim, column, shape});
      column += 4 * dim;
    }
  }

  uint64_t take(uint64_t bytes) {
    const uint64_t offset = heap_bytes_;
    heap_bytes_ += (bytes + 127) / 128 * 128;
    guards_.push_back(heap_bytes_);
    heap_bytes_ += kGuardBytes;
    return offset;
  }

  void lay_out_heap() {
    const auto size = static_cast<uint64_t>(world_.size);
    const auto own_bytes = static_cast<uint64_t>(world_.column_start[rank_ + 1] - world_.column_start[rank_]);
    plan_.team.grants_offset = take((size + 2) * sizeof(po::Grant));
    plan_.team.ready_offset = take(size * kReadyStride * sizeof(uint64_t));
    plan_.team.abort_offset = take(size * sizeof(uint64_t));
    // What follows is this PE's own business: it lies elsewhere on every PE, and senders learn where from the grant.
    take(static_cast<uint64_t>(rank_) * 256);
    plan_.staging_offset = take(static_cast<uint64_t>(world_.batch_start.back()) * own_bytes);
    for (uint64_t& output : outputs_) output = take(output_bytes());
    heap_ = static_cast<uint8_t*>(std::aligned_alloc(128, heap_bytes_));
    std::memset(heap_, 0, heap_bytes_);
    for (const uint64_t offset : guards_) std::memset(heap_ + offset, kGuard, kGuardBytes);
    for (const uint64_t output : outputs_) fill_output(output);
    world_.heaps[rank_] = heap_;
  }

  void fill_plan() {
    const driver::Options& options = world_.options;
    const bool is_direct = options.text("--transport") == "direct";
    const int64_t slice = options.number("--slice");
    auto num_tasks = [&](int pe) { return po::ceil_div(world_.batch[pe], slice) * world_.tables[rank_]; };
    int64_t num_rounds = 0;
    int64_t num_slices = 0;
    for (int pe = 0; pe < world_.size; ++pe) {
      num_slices += po::ceil_div(world_.batch[pe], slice);
      if (pe != rank_) num_rounds = std::max(num_rounds, num_tasks(pe));
    }
    wg_done_.assign(static_cast<size_t>(num_slices * (po::ceil_div<int64_t>(world_.tables[rank_], 64) + 1)), 0);

    po::Team& team = plan_.team;
    team.rank = rank_;
    team.size = world_.size;
    team.heap = heap_;
    team.ready_stride = kReadyStride;
    team.local = &local_;
    plan_.wg_done = wg_done_.data();
    team.error = &error_;
    team.input_error = &input_error_;
    set_contract(0);

    po::ExchangeOrder& order = plan_.order;
    order.rank = rank_;
    order.size = world_.size;
    order.num_tables = world_.tables[rank_];
    order.slice_samples = slice;
    order.batch_start = world_.batch_start.data();
    order.num_rounds = num_rounds;
    order.local_delay = options.number("--local-delay") < 0 ? num_rounds : options.number("--local-delay");
    order.oblivious = options.text("--schedule") == "oblivious";
    order.slice_major = !is_direct;

    plan_.tables = tables_.data();
    plan_.column_start = world_.column_start.data();
    plan_.batch = world_.batch_start.back();
    plan_.output_row_bytes = world_.row_bytes();
    plan_.reports_bad_input = 1;
  }

  void set_contract(int64_t variant) {
    for (int i = 0; i < po::kContractWords; ++i) plan_.team.contract[i] = 1000 + i + variant;
    plan_.team.contract_hash = static_cast<uint64_t>(0x5a5a + variant);
  }

  // On a busy machine a PE may be late by more than a wait for one that never comes should last.
  void set_timeout(bool is_trouble) {
    constexpr int64_t kMinute = 60000;
    const driver::Options& options = world_.options;
    const bool is_told = is_trouble || options.number("--trouble-at") < 0;
    const int64_t ms = is_told ? options.number("--timeout-ms") : kMinute;
    const int64_t factor = is_told && rank_ == options.number("--patient-pe") ? 10 : 1;
    plan_.team.timeout_ns = static_cast<uint64_t>(ms * factor) * 1000000;
  }

  void await_turn() const {
    const std::vector<int64_t> order = world_.options.list("--in-turn");
    for (size_t i = 1; i < order.size(); ++i) {
      if (order[i] != rank_) continue;
      const std::atomic<bool>& before = world_.has_left[static_cast<size_t>(order[i - 1])];
      driver::wait_until([&] { return before.load(std::memory_order_relaxed); });
    }
  }

  void nap(int64_t launch) const {
    const auto longest = static_cast<uint64_t>(world_.options.number("--slow-us"));
    const std::vector<int64_t> slow = world_.options.list("--slow-pes");
    for (size_t i = 0; i < slow.size(); ++i) {
      if (slow[i] == rank_)
        usleep(static_cast<useconds_t>((i + 1) * (longest / 2 + mix({4, launch}) % (longest / 2 + 1))));
    }
  }

  void run_kernel(int64_t launch, bool is_trouble) {
    std::vector<int64_t> indices;
    std::vector<int64_t> offsets{0};
    for (int64_t t = 0; t < world_.tables[rank_]; ++t) {
      for (int64_t bag = 0; bag < world_.batch_start.back(); ++bag) {
        const int64_t length = world_.bag_length(rank_, t, bag, launch);
        for (int64_t i = 0; i < length; ++i) indices.push_back(row_of(rank_, t, bag, i, launch));
        offsets.push_back(static_cast<int64_t>(indices.size()));
      }
    }
    const bool is_mismatch = is_trouble && rank_ == world_.options.number("--mismatch-pe");
    set_contract(is_mismatch ? 1 : 0);
    const Call call{indices.data(), offsets.data(), nullptr, static_cast<int64_t>(indices.size()),
                    output_offset(launch)};
    po::run_on_host<Kernel>(&plan_, call, static_cast<int>(world_.options.number("--wgs")),
                            static_cast<int>(world_.options.number("--threads")));
    if (input_error_.state != 0) fail(driver::kWrongReport, "PE %d: good input was reported as bad", rank_);
  }

  uint64_t output_bytes() const { return static_cast<uint64_t>(world_.batch[rank_] * world_.row_bytes()); }
  uint64_t output_offset(int64_t launch) const { return outputs_[launch % 2]; }
  uint32_t* output_words(uint64_t offset) const { return reinterpret_cast<uint32_t*>(heap_ + offset); }

  void fill_output(uint64_t offset) const { std::fill_n(output_words(offset), output_bytes() / 4, kStale); }

  void check_output(int64_t launch) const {
    const uint32_t* words = output_words(output_offset(launch));
    for (int64_t row = 0; row < world_.batch[rank_]; ++row) {
      const int64_t bag = world_.batch_start[rank_] + row;
      for (int sender = 0; sender < world_.size; ++sender) {
        for (int64_t t = 0; t < world_.tables[sender]; ++t) {
          const int64_t length = world_.bag_length(sender, t, bag, launch);
          for (int64_t c = 0; c < world_.dim(sender, t); ++c, ++words) {
            float expected = 0;
            for (int64_t i = 0; i < length; ++i) {
              expected += table_value(sender, t, row_of(sender, t, bag, i, launch), c);
            }
            if (*words != po::float_bits(expected)) {
              fail(driver::kWrongOutput,
                   "PE %d, launch %ld: row %ld from PE %d, table %ld, column %ld is %g (0x%08x), not %g", rank_, launch,
                   row, sender, t, c, po::bits_float(*words), *words, expected);
            }
          }
        }
      }
    }
  }

  [[noreturn]] void fail_with_record(driver::Exit status, int64_t launch) const {
    fail(status, "PE %d, launch %ld: aborted: kind %lu, phase %lu, peer %lu, index %lu, epoch %lu, saw 0x%lx", rank_,
         launch, error_.kind, error_.phase, error_.peer, error_.index, error_.epoch, error_.seen);
  }

  // A launch in which one PE stayed away, came too late or came with another contract: everybody left, knows why, and
  // has no data from that PE. A late PE has no data at all: the others had left before it began.
  void check_trouble(int64_t launch) {
    const driver::Options& options = world_.options;
    const auto stopped = static_cast<int>(options.number("--stop-pe"));
    const auto late = static_cast<int>(options.number("--late-pe"));
    const auto mismatched = static_cast<int>(options.number("--mismatch-pe"));
    const int absent = stopped >= 0 ? stopped : late;
    if (rank_ == stopped) return;
    if (error_.state == 0 && rank_ == late) check_output(launch);  // if rows are wrong, this tells which
    if (error_.state == 0) fail(driver::kWrongReport, "PE %d, launch %ld: did not notice the trouble", rank_, launch);
    const auto blamed = static_cast<int>(error_.peer);
    if (absent >= 0) {
      // PEs that were there find out by their own time-out or from one another; a late PE hears from them that it is
      // blamed itself.
      const bool is_as_told = rank_ != options.number("--expect-reported") || error_.kind == po::kReportedByPeer;
      const bool is_from_witness = error_.kind == po::kReportedByPeer && static_cast<int>(error_.index) != absent;
      const bool is_known = error_.kind == po::kTimeout || is_from_witness;
      if (blamed != absent || !is_known || !is_as_told) fail_with_record(driver::kWrongReport, launch);
    } else {
      // Whoever noticed first tells the others, with the reason, and whom it blames.
      const bool was_told = error_.kind == po::kReportedByPeer;
      const auto reason = was_told ? po::low_bits_of(error_.seen) >> po::kBlameKindShift : error_.kind;
      const bool is_named = blamed == mismatched || (was_told && static_cast<int>(error_.index) == mismatched);
      if ((rank_ != mismatched && !is_named) || reason != po::kContractMismatch)
        fail_with_record(driver::kWrongReport, launch);
    }
    const auto behind = static_cast<uint64_t>(options.number("--queued"));
    if (local_.epoch < error_.epoch || local_.epoch > error_.epoch + behind) {
      fail(driver::kWrongRemains, "PE %d: the aborted launch did not close its epoch", rank_);
    }

    const int silent = absent >= 0 ? absent : mismatched;
    const auto first = static_cast<size_t>(world_.column_start[silent] / 4);
    const auto last = static_cast<size_t>(world_.column_start[silent + 1] / 4);
    const auto width = static_cast<size_t>(world_.row_bytes() / 4);
    const uint32_t* words = output_words(output_offset(launch));
    for (size_t i = 0; i < output_bytes() / 4; ++i) {
      const bool is_from_silent = rank_ == late || (i % width >= first && i % width < last);
      if (is_from_silent && words[i] != kAborted) {
        fail(driver::kWrongOutput, "PE %d: word %zu of an aborted launch's output is 0x%08x, not poisoned", rank_, i,
             words[i]);
      }
    }
  }

  // What the host does to start again: no PE is in a launch, then nothing is under way, then all are clean.
  void recover() {
    world_.epochs[rank_] = local_.epoch;
    world_.meeting.arrive_and_wait();
    network_->quiet();
    world_.meeting.arrive_and_wait();
    const uint64_t epoch = *std::max_element(world_.epochs.begin(), world_.epochs.end()) + 1;
    std::memset(heap_ + plan_.team.abort_offset, 0, sizeof(uint64_t) * static_cast<size_t>(world_.size));
    std::memset(&local_, 0, sizeof(local_));
    std::fill(wg_done_.begin(), wg_done_.end(), 0);
    local_.epoch = epoch;
    error_.state = 0;
    world_.meeting.arrive_and_wait();
  }

  World& world_;
  const int rank_;
  std::vector<std::vector<float>> rows_;
  std::vector<Table> tables_;
  uint8_t* heap_ = nullptr;
  uint64_t heap_bytes_ = 0;
  std::vector<uint64_t> guards_;
  uint64_t outputs_[2] = {};
  std::vector<uint64_t> peer_heaps_;
  std::vector<uint64_t> wg_done_;
  std::unique_ptr<po::DelayedNetwork> network_;
  po::LocalState local_{};
  po::ErrorRecord error_{};
  po::InputErrorRecord input_error_{};
  Plan plan_{};
};

}  // namespace

int main(int argc, char** argv) {
  options.parse(argc, argv);
  World world(options);
  std::vector<std::unique_ptr<Pe>> pes;
  for (int rank = 0; rank < world.size; ++rank) pes.push_back(std::make_unique<Pe>(world, rank));
  for (auto& pe : pes) pe->connect();
  driver::run_side_by_side(pes);
  for (auto& pe : pes) pe->close();
  for (auto& pe : pes) pe->check_remains();
  return 0;
}
