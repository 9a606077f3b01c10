// Runs the host build of embedding_all_to_all with all PEs as threads of one process, launch after launch, and checks
// every output. Built with -fsanitize=thread: all PEs share one address space, so a missing release, acquire, sync or
// credit is a data race in it, also where the values happen to be right.
//
// Between two launches a PE reads its output and overwrites it with plain accesses, as a user's next operators would.
// exits.h says how it ends.

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <string_view>
#include <vector>

#include "driver.h"
#include "kernels/embedding_all_to_all.cuh"

namespace {

using driver::fail;
using po::embedding_all_to_all::Call;
using po::embedding_all_to_all::ColumnRange;
using po::embedding_all_to_all::Config;
using Kernel = po::embedding_all_to_all::Kernel<Config{.shapes = 3, .rows_in_flight = 4}>;
using po::embedding_all_to_all::Plan;
using po::embedding_all_to_all::Sender;
using po::embedding_all_to_all::Table;

constexpr int kNumRows = 37;              // of every table
constexpr uint32_t kStale = 0x7b7b7b7bu;  // what an output holds before its launch
constexpr uint32_t kAborted = 0xffffffffu;
constexpr uint64_t kReadyStride = 64;

// ---- options --------------------------------------------------------------------------------------------------------

driver::Options options({{"--tables", "2,2"},     // tables of each PE; as many entries as there are PEs
                         {"--batch", "5,4"},      // samples of each PE
                         {"--dims", "wide"},      // wide: rows of whole vectors; odd: any width
                         {"--columns", "by-pe"},  // or in-turn: of the first table of each PE, then of the second ones
                         {"--wgs", "1"},
                         {"--threads", "1"},
                         {"--slice", "2"},  // samples per slice
                         {"--epochs", "6"},
                         {"--schedule", "aware"},    // aware | oblivious
                         {"--local-delay", "0"},     // rounds; -1 for all
                         {"--transport", "direct"},  // direct | staged | mixed: PEs of equal parity reach each other
                         {"--slow-pes", ""},         // the second sleeps twice as long as the first, which sleeps ...
                         {"--slow-us", "0"},         // ... between half of this and this
                         {"--heavy-pe", "-1"},       // has huge bags
                         {"--patient-pe", "-1"},     // waits ten times as long
                         {"--late-pe", "-1"},        // at the trouble, does not launch before all others have given up
                         {"--in-turn", ""},          // PEs that launch there when the one before has left
                         {"--expect-reported", "-1"}},  // leaves because a peer gave up, not by its own time-out
                        {driver::kLaunches, driver::kTroubles});

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

struct World : driver::World {
  const bool is_odd = options.text("--dims") == "odd";
  std::vector<int64_t> tables = options.list("--tables");
  std::vector<int64_t> batch = options.list("--batch");
  std::vector<int64_t> batch_start = std::vector<int64_t>(static_cast<size_t>(size) + 1, 0);
  std::vector<int64_t> pe_bytes = std::vector<int64_t>(static_cast<size_t>(size), 0);
  std::vector<std::vector<int64_t>> columns;  // by PE and table: where its columns begin, in bytes
  std::vector<std::atomic<bool>> has_left =
      std::vector<std::atomic<bool>>(static_cast<size_t>(size));  // the launch with the trouble

  explicit World(const driver::Options& options_in)
      : driver::World(options_in, static_cast<int>(options_in.list("--tables").size())) {
    if (batch.size() != tables.size() || tables.empty())
      fail(driver::kBadOption, "--tables and --batch need one entry per PE");
    std::partial_sum(batch.begin(), batch.end(), batch_start.begin() + 1);
    const bool is_in_turn = options.text("--columns") == "in-turn";  // first tables of all PEs, then second ones, ...
    const int64_t most = *std::max_element(tables.begin(), tables.end());
    for (const int64_t count : tables) columns.emplace_back(static_cast<size_t>(count));
    int64_t column = 0;
    for (int64_t i = 0; i < size * most; ++i) {
      const auto pe = static_cast<int>(is_in_turn ? i % size : i / most);
      const int64_t t = is_in_turn ? i / size : i % most;
      if (t >= tables[pe]) continue;
      columns[pe][t] = column;
      pe_bytes[pe] += 4 * dim(pe, t);
      column += 4 * dim(pe, t);
    }
  }

  int64_t dim(int pe, int64_t table) const {
    constexpr int64_t kWide[] = {4, 36, 8};  // 36: more than one pass over the row
    constexpr int64_t kOdd[] = {1, 3, 10};
    return (is_odd ? kOdd : kWide)[(pe + table) % 3];
  }

  int64_t bag_length(int pe, int64_t table, int64_t bag, int64_t launch) const {
    if (pe == options.number("--heavy-pe")) return 400;
    const uint64_t drawn = mix({3, pe, table, bag, launch});
    return drawn % 11 == 0 ? 30 : static_cast<int64_t>(drawn % 4);  // empty ones as well
  }

  int64_t row_bytes() const { return std::accumulate(pe_bytes.begin(), pe_bytes.end(), int64_t{0}); }
};

// ---- one PE ---------------------------------------------------------------------------------------------------------

class Pe final : public driver::BasePe<Plan, World> {
 public:
  Pe(World& world_in, int rank_in) : BasePe(world_in, rank_in, kReadyStride) {
    build_tables();
    lay_out_heap();
    fill_plan();
  }

  void check_remains() const override {
    BasePe::check_remains();
    for (const uint64_t word : wg_done_) {
      if (word != 0) fail(driver::kWrongRemains, "PE %d: a WG_Done word is not zero after the launches", rank);
    }
  }

 private:
  void build_tables() {
    int64_t staged = 0;
    for (int64_t t = 0; t < world.tables[rank]; ++t) {
      const int64_t dim = world.dim(rank, t);
      std::vector<float> rows;
      for (int64_t r = 0; r < kNumRows; ++r) {
        for (int64_t c = 0; c < dim; ++c) rows.push_back(table_value(rank, t, r, c));
      }
      rows_.push_back(std::move(rows));
      const auto shape = world.is_odd ? po::embedding_all_to_all::kElementwise : po::embedding_all_to_all::kLanes32x2;
      const int64_t column = world.columns[rank][t];
      tables_.push_back(
          {reinterpret_cast<const uint8_t*>(rows_.back().data()), kNumRows, 4 * dim, column, staged, shape});
      staged += 4 * dim;
    }
    int64_t before = 0;
    for (int pe = 0; pe < world.size; ++pe) {
      const auto first = static_cast<int64_t>(ranges_.size());
      for (int64_t t = 0, side = 0; t < world.tables[pe]; side += 4 * world.dim(pe, t++)) {
        const int64_t column = world.columns[pe][t];
        const bool begins = static_cast<int64_t>(ranges_.size()) == first;
        if (begins || ranges_.back().column_bytes + ranges_.back().bytes != column)
          ranges_.push_back({column, side, 0});
        ranges_.back().bytes += 4 * world.dim(pe, t);
      }
      senders_.push_back({first, static_cast<int64_t>(ranges_.size()) - first, before});
      before += world.pe_bytes[pe];
    }
  }

  void lay_out_heap() {
    const auto own_bytes = static_cast<uint64_t>(world.pe_bytes[rank]);
    // What follows is this PE's own business: it lies elsewhere on every PE, and senders learn where from the grant.
    take(static_cast<uint64_t>(rank) * 256);
    plan.staging_offset = take(static_cast<uint64_t>(world.batch_start.back()) * own_bytes);
    for (uint64_t& output : outputs_) output = take(output_bytes());
    landing_offset_ = take(output_bytes());
    allocate_heap();
    fill_outputs();
  }

  void fill_plan() {
    const bool is_direct = options.text("--transport") == "direct";
    const int64_t slice = options.number("--slice");
    auto num_tasks = [&](int pe) { return po::ceil_div(world.batch[pe], slice) * world.tables[rank]; };
    int64_t num_rounds = 0;
    int64_t num_slices = 0;
    for (int pe = 0; pe < world.size; ++pe) {
      num_slices += po::ceil_div(world.batch[pe], slice);
      if (pe != rank) num_rounds = std::max(num_rounds, num_tasks(pe));
    }
    wg_done_.assign(static_cast<size_t>(num_slices * (po::ceil_div<int64_t>(world.tables[rank], 64) + 1)), 0);

    plan.wg_done = wg_done_.data();

    po::ExchangeOrder& order = plan.order;
    order.rank = rank;
    order.size = world.size;
    order.num_tables = world.tables[rank];
    order.slice_samples = slice;
    order.batch_start = world.batch_start.data();
    order.num_rounds = num_rounds;
    order.local_delay = options.number("--local-delay") < 0 ? num_rounds : options.number("--local-delay");
    order.oblivious = options.text("--schedule") == "oblivious";
    order.slice_major = !is_direct;

    plan.tables = tables_.data();
    plan.pe_bytes = world.pe_bytes.data();
    plan.ranges = ranges_.data();
    plan.senders = senders_.data();
    plan.batch = world.batch_start.back();
    plan.output_row_bytes = world.row_bytes();
    plan.reports_bad_input = 1;
  }

  bool is_reachable(int pe) const override {
    const std::string_view transport = options.text("--transport");
    return transport == "direct" || (transport == "mixed" && pe % 2 == rank % 2);
  }

  int64_t timeout_ms(bool is_trouble) const override {
    const bool is_patient = (is_trouble || trouble_at() < 0) && rank == options.number("--patient-pe");
    return BasePe::timeout_ms(is_trouble) * (is_patient ? 10 : 1);
  }

  bool has_late_pe() const { return options.number("--late-pe") >= 0; }
  bool somebody_stays_away() const override { return has_late_pe() || BasePe::somebody_stays_away(); }

  void await_turn() const {
    const std::vector<int64_t> order = options.list("--in-turn");
    for (size_t i = 1; i < order.size(); ++i) {
      if (order[i] != rank) continue;
      const std::atomic<bool>& before = world.has_left[static_cast<size_t>(order[i - 1])];
      driver::wait_until([&] { return before.load(std::memory_order_relaxed); });
    }
  }

  void before_launch(int64_t launch) override {
    const auto longest = static_cast<uint64_t>(options.number("--slow-us"));
    const std::vector<int64_t> slow = options.list("--slow-pes");
    for (size_t i = 0; i < slow.size(); ++i) {
      if (slow[i] == rank)
        usleep(static_cast<useconds_t>((i + 1) * (longest / 2 + mix({4, launch}) % (longest / 2 + 1))));
    }
  }

  void go_through_trouble(int64_t launch) override {
    const bool is_late = rank == options.number("--late-pe");
    const bool is_stopped = rank == options.number("--stop-pe");
    await_turn();
    if (is_late) world.meeting.arrive_and_wait();
    if (!is_stopped) run_kernel(launch);
    world.has_left[static_cast<size_t>(rank)].store(true, std::memory_order_relaxed);
    for (int64_t i = 1; i <= options.number("--queued") && !is_stopped; ++i) run_kernel(launch + i);
    check_trouble(launch);
    if (has_late_pe() && !is_late) world.meeting.arrive_and_wait();
  }

  void run_kernel(int64_t launch) override {
    std::vector<int64_t> indices;
    std::vector<int64_t> offsets{0};
    for (int64_t t = 0; t < world.tables[rank]; ++t) {
      for (int64_t bag = 0; bag < world.batch_start.back(); ++bag) {
        const int64_t length = world.bag_length(rank, t, bag, launch);
        for (int64_t i = 0; i < length; ++i) indices.push_back(row_of(rank, t, bag, i, launch));
        offsets.push_back(static_cast<int64_t>(indices.size()));
      }
    }
    const Call call{indices.data(),        offsets.data(), nullptr,        static_cast<int64_t>(indices.size()),
                    output_offset(launch), nullptr,        landing_offset_};
    launch_on_host<Kernel>(plan_of(launch), call);
  }

  uint64_t output_bytes() const { return static_cast<uint64_t>(world.batch[rank] * world.row_bytes()); }
  uint64_t output_offset(int64_t launch) const { return outputs_[launch % 2]; }
  uint32_t* output_words(uint64_t offset) const { return reinterpret_cast<uint32_t*>(heap + offset); }

  void fill_output(uint64_t offset) const { std::fill_n(output_words(offset), output_bytes() / 4, kStale); }

  void fill_outputs() const {
    for (const uint64_t output : outputs_) fill_output(output);
  }

  void check(int64_t launch) override {
    check_output(launch);
    fill_outputs();
  }

  void check_output(int64_t launch) const {
    for (int64_t row = 0; row < world.batch[rank]; ++row) {
      const uint32_t* row_words = output_words(output_offset(launch)) + row * world.row_bytes() / 4;
      const int64_t bag = world.batch_start[rank] + row;
      for (int sender = 0; sender < world.size; ++sender) {
        for (int64_t t = 0; t < world.tables[sender]; ++t) {
          const int64_t length = world.bag_length(sender, t, bag, launch);
          const uint32_t* words = row_words + world.columns[sender][t] / 4;
          for (int64_t c = 0; c < world.dim(sender, t); ++c, ++words) {
            float expected = 0;
            for (int64_t i = 0; i < length; ++i) {
              expected += table_value(sender, t, row_of(sender, t, bag, i, launch), c);
            }
            if (*words != po::float_bits(expected)) {
              fail(driver::kWrongOutput,
                   "PE %d, launch %ld: row %ld from PE %d, table %ld, column %ld is %g (0x%08x), not %g", rank, launch,
                   row, sender, t, c, po::bits_float(*words), *words, expected);
            }
          }
        }
      }
    }
  }

  // A launch in which one PE stayed away, came too late or came with another contract: everybody left, knows why, and
  // has no data from that PE. A late PE has no data at all: the others had left before it began.
  void check_trouble(int64_t launch) {
    const auto stopped = static_cast<int>(options.number("--stop-pe"));
    const auto late = static_cast<int>(options.number("--late-pe"));
    const auto mismatched = static_cast<int>(options.number("--other-pe"));
    const int absent = stopped >= 0 ? stopped : late;
    if (rank == stopped) return;
    if (error.state == 0 && rank == late) check_output(launch);  // if rows are wrong, this says which
    if (error.state == 0) fail(driver::kWrongReport, "PE %d, launch %ld: did not notice the trouble", rank, launch);
    const auto blamed = static_cast<int>(error.peer);
    if (absent >= 0) {
      // PEs that were there find out by their own time-out or from one another; a late PE hears from them that it is
      // blamed itself.
      const bool is_as_told = rank != options.number("--expect-reported") || error.kind == po::kReportedByPeer;
      const bool is_from_witness = error.kind == po::kReportedByPeer && static_cast<int>(error.index) != absent;
      const bool is_known = error.kind == po::kTimeout || is_from_witness;
      if (blamed != absent || !is_known || !is_as_told) fail_with_record(driver::kWrongReport, launch);
    } else {
      // The first PE to notice informs the others: the reason, and the PE that it blames.
      const bool was_told = error.kind == po::kReportedByPeer;
      const auto reason = was_told ? po::low_bits_of(error.seen) >> po::kBlameKindShift : error.kind;
      const bool is_named = blamed == mismatched || (was_told && static_cast<int>(error.index) == mismatched);
      if ((rank != mismatched && !is_named) || reason != po::kContractMismatch)
        fail_with_record(driver::kWrongReport, launch);
    }
    const auto behind = static_cast<uint64_t>(options.number("--queued"));
    if (local.epoch < error.epoch || local.epoch > error.epoch + behind) {
      fail(driver::kWrongRemains, "PE %d: the aborted launch did not close its epoch", rank);
    }

    const int silent = absent >= 0 ? absent : mismatched;
    const auto width = static_cast<size_t>(world.row_bytes() / 4);
    std::vector<bool> are_silent(width);  // columns
    for (int64_t t = 0; t < world.tables[silent]; ++t) {
      std::fill_n(are_silent.begin() + world.columns[silent][t] / 4, world.dim(silent, t), true);
    }
    const uint32_t* words = output_words(output_offset(launch));
    for (size_t i = 0; i < output_bytes() / 4; ++i) {
      const bool is_from_silent = rank == late || are_silent[i % width];
      if (is_from_silent && words[i] != kAborted) {
        fail(driver::kWrongOutput, "PE %d: word %zu of an aborted launch's output is 0x%08x, not poisoned", rank, i,
             words[i]);
      }
    }
  }

  void clear() override {
    std::fill(wg_done_.begin(), wg_done_.end(), 0);
    fill_outputs();
  }

  std::vector<std::vector<float>> rows_;
  std::vector<Table> tables_;
  std::vector<ColumnRange> ranges_;
  std::vector<Sender> senders_;
  uint64_t landing_offset_ = 0;
  uint64_t outputs_[2] = {};
  std::vector<uint64_t> wg_done_;
};

}  // namespace

int main(int argc, char** argv) { return driver::run<Pe>(argc, argv, options); }
