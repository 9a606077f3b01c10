// What the drivers share: their options, how they fail, what a PE of any operator has and does, launch after launch, and
// all PEs at work as threads of one process.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <span>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "comm/team.cuh"
#include "exits.h"
#include "platform/entry.cuh"
#include "platform/host_network.h"

namespace driver {

[[noreturn]] inline void fail(Exit status, const char* format, ...) {
  static std::mutex mutex;
  mutex.lock();  // never released: only the first failure is reported
  va_list arguments;
  va_start(arguments, format);
  std::vfprintf(stderr, format, arguments);
  va_end(arguments);
  std::fputc('\n', stderr);
  std::fflush(stderr);
  std::_Exit(status);
}

// The end of a launch that was given up without a reason that the driver knows of.
inline Exit exit_of_aborted(const po::ErrorRecord& error) {
  const bool was_told = error.kind == po::kReportedByPeer;
  const uint64_t reason = was_told ? po::low_bits_of(error.seen) >> po::kBlameKindShift : error.kind;
  return reason == po::kTimeout ? kTimedOut : kMismatched;
}

// ---- options --------------------------------------------------------------------------------------------------------

struct Default {
  const char* name;
  const char* value;
};

// Options of every driver.
inline constexpr Default kLaunches[] = {
    {"--wgs", "2"},              // WGs per launch
    {"--threads", "2"},          // threads per WG
    {"--epochs", "8"},           // launches
    {"--first-epoch", "1"},      // epoch of the first launch
    {"--delay-us", "0"},         // longest delay of an operation of the network
    {"--slow-us", "2000"},       // for which slow PEs sleep before each of their launches
    {"--report-after-ms", "0"},  // until a PE reports that a launch was given up: others may find more
    {"--timeout-ms", "60000"}};  // of one wait; if there is trouble, then until recovery

// A world in which PEs differ by their rank alone.
inline constexpr Default kWorld[] = {{"--pes", "2"},
                                     {"--staged", "0"},  // whether PEs reach their peers through the network ...
                                     {"--node", "1"},    // ... but for so many in a row, which reach each other
                                     {"--slow-pe", "-1"}};

// A launch that is given up.
inline constexpr Default kTroubles[] = {
    {"--stop-pe", "-1"},     // does not launch, or ...
    {"--other-pe", "-1"},    // ... launches under another contract, ...
    {"--other-call", "0"},   // ... which is of another call's number alone, at ...
    {"--trouble-at", "-1"},  // ... this launch (from 0); then all recover and go on
    {"--queued", "0"}};      // launches behind it that look at no errors, as in a GPU's queue

// --name=value; a name that has no default is none.
//
// Drivers look options up wherever they need one, innermost loops included, and none changes once there are threads: the
// sanitizer does not watch it, which would be most of what a run takes.
class Options {
 public:
  // A driver's own, which count where `shared` ones have other defaults.
  Options(std::initializer_list<Default> own, std::initializer_list<std::span<const Default>> shared) {
    for (const Default& given : own) add(given);
    for (const std::span<const Default>& defaults : shared) {
      for (const Default& given : defaults) {
        if (!has(given.name)) add(given);
      }
    }
  }

  void parse(int argc, char** argv) {
    for (int i = 1; i < argc; ++i) {
      char* equals = std::strchr(argv[i], '=');
      if (equals != nullptr) *equals = '\0';
      if (equals == nullptr || !has(argv[i])) fail(kBadOption, "unknown option %s", argv[i]);
      set(options_[place_of(argv[i])], equals + 1);
    }
  }

  bool has(const char* name) const { return place_of(name) < count_; }
  std::string_view text(const char* name) const { return known(name).text; }

  int64_t number(const char* name) const {
    const Option& option = known(name);
    if (!option.is_number) fail(kBadOption, "%s is no number", name);
    return option.number;
  }

  std::vector<int64_t> list(const char* name) const {
    std::vector<int64_t> numbers;
    for (const char* text = known(name).text; *text != '\0';) {
      char* end = nullptr;
      numbers.push_back(std::strtoll(text, &end, 10));
      if (end == text) fail(kBadOption, "%s is no list of numbers", name);
      text = end + (*end == ',');
    }
    return numbers;
  }

 private:
  static constexpr int kMost = 48;

  struct Option {
    const char* name;
    const char* text;
    int64_t number;
    bool is_number;
  };

  void add(const Default& given) {
    if (count_ == kMost) fail(kBadOption, "a driver has at most %d options", kMost);
    options_[count_].name = given.name;
    set(options_[count_++], given.value);
  }

  static void set(Option& option, const char* text) {
    char* end = nullptr;
    option.text = text;
    option.number = std::strtoll(text, &end, 10);
    option.is_number = end != text && *end == '\0';
  }

  const Option& known(const char* name) const {
    const int place = place_of(name);
    if (place == count_) fail(kBadOption, "there is no option %s", name);
    return options_[place];
  }

  // The place of an option, or how many there are. Not with strcmp, which the sanitizer intercepts.
  __attribute__((no_sanitize("thread"))) int place_of(const char* name) const {
    for (int place = 0; place < count_; ++place) {
      const char* letter = options_[place].name;
      const char* other = name;
      while (*letter != '\0' && *letter == *other) {
        ++letter;
        ++other;
      }
      if (*letter == *other) return place;
    }
    return count_;
  }

  Option options_[kMost] = {};
  int count_ = 0;
};

// ---- meeting --------------------------------------------------------------------------------------------------------

// Waits until a condition holds. What it looks at must be atomic and relaxed: waiting then orders nothing that the sanitizer
// knows of, so it hides no race.
template <class Condition>
void wait_until(const Condition& condition) {
  while (!condition()) usleep(200);
}

// Where PEs meet. A meeting creates no order that the sanitizer sees between what comes before and after it.
class Meeting {
 public:
  explicit Meeting(int size) : size_(size) {}

  void arrive_and_wait() {
    const int64_t last = (arrived_.fetch_add(1, std::memory_order_relaxed) / size_ + 1) * size_;
    wait_until([&] { return arrived_.load(std::memory_order_relaxed) >= last; });
  }

 private:
  const int64_t size_;
  std::atomic<int64_t> arrived_{0};
};

// What the PEs of a process know of each other.
struct World {
  World(const Options& options_in, int size_in)
      : options(options_in),
        size(size_in),
        heaps(static_cast<size_t>(size)),
        epochs(static_cast<size_t>(size)),
        meeting(size),
        start(size) {}

  explicit World(const Options& options_in) : World(options_in, static_cast<int>(options_in.number("--pes"))) {}

  const Options& options;
  const int size;
  std::vector<uint8_t*> heaps;   // of each PE
  std::vector<uint64_t> epochs;  // of each PE: the last launch that it may have taken part in
  std::barrier<> meeting;
  Meeting start;  // of a launch that a PE stays away from
};

// ---- one PE ---------------------------------------------------------------------------------------------------------

// What all operators' PEs have, and what they do. An operator's own, derived from this, takes its buffers, allocates the
// heap, fills in what of its plan is not the team, and says how it launches and what the results must be.
template <class PlanOfOperator, class WorldOfOperator = World>
class BasePe {
 public:
  using Plan = PlanOfOperator;
  using World = WorldOfOperator;

  BasePe(World& world_in, int rank_in, uint64_t ready_stride)
      : world(world_in), rank(rank_in), size(world_in.size), host_says(static_cast<size_t>(size)) {
    const auto pes = static_cast<uint64_t>(size);
    po::Team& team = plan.team;
    take(kUnusedBytes);  // where stores without credit go: over credits, they would crash later launches
    team.grants_offset = take(static_cast<uint64_t>(po::num_grants(size)) * sizeof(po::Grant));
    team.ready_offset = take(pes * ready_stride * sizeof(uint64_t));
    team.abort_offset = take(pes * sizeof(uint64_t));
    team.rank = rank;
    team.size = size;
    team.ready_stride = ready_stride;
    team.local = &local;
    team.host_says = host_says.data();
    team.error = &error;
    team.input_error = &input_error;
    set_contract(plan, 0);
    local.epoch = static_cast<uint64_t>(number("--first-epoch")) - 1;
  }

  BasePe(const BasePe&) = delete;
  BasePe& operator=(const BasePe&) = delete;

  virtual ~BasePe() { std::free(heap); }

  // After all PEs are made: they know each other's heaps then.
  virtual void connect() {
    std::vector<uint64_t> all;
    for (int pe = 0; pe < size; ++pe) {
      all.push_back(reinterpret_cast<uint64_t>(world.heaps[static_cast<size_t>(pe)]));
      peer_heaps.push_back(pe == rank || is_reachable(pe) ? all.back() : 0);
    }
    plan.team.peer_heaps = peer_heaps.data();
    network = std::make_unique<po::DelayedNetwork>(all.data(), size, static_cast<uint64_t>(number("--delay-us")),
                                                   static_cast<uint64_t>(rank + 1));
    const bool has_far_peers = std::count(peer_heaps.begin(), peer_heaps.end(), uint64_t{0}) != 0;
    plan.team.network = has_far_peers ? network.get() : nullptr;
  }

  void run() {
    for (int64_t launch = 0; launch < number("--epochs"); ++launch) {
      const bool is_trouble = is_trouble_at(launch);
      plan.team.timeout_ns = static_cast<uint64_t>(timeout_ms(is_trouble)) * 1000000;
      // Who is there must not be taken for the one that is not.
      if (is_trouble && somebody_stays_away()) world.start.arrive_and_wait();
      before_launch(launch);
      if (is_trouble) {
        go_through_trouble(launch);
        recover();
      } else {
        run_kernel(launch);
        if (error.state != 0) {
          usleep(static_cast<useconds_t>(number("--report-after-ms") * 1000));
          fail_with_record(exit_of_aborted(error), launch);
        }
        check(launch);
      }
    }
  }

  // Delivers what is still under way. Other PEs' heaps are there until all PEs are closed.
  void close() { network.reset(); }

  // When all PEs are closed: nothing has written outside of the buffers.
  virtual void check_remains() const {
    for (const uint64_t guard : guards) {
      for (uint64_t offset = guard; offset < guard + kGuardBytes; ++offset) {
        if (heap[offset] != kGuard) {
          fail(kWrongRemains, "PE %d: a write outside the buffers, at heap offset %lu", rank, offset);
        }
      }
    }
  }

 protected:
  // ---- of the operator ----

  virtual void run_kernel(int64_t launch) = 0;

  // Ends the process if the results of a launch, or what it leaves in memory, are wrong.
  virtual void check(int64_t launch) = 0;

  // The same of a launch that was given up.
  virtual void check_given_up(int64_t) {}

  // Nothing in this PE's heap is from a launch after the one that its sender gave up.
  virtual void check_traces() const {
    const po::Team& team = plan.team;
    for (int sender = 0; sender < size; ++sender) {
      for (const int place : {sender, size + po::kGrantCopies + sender}) {  // of even epochs, of odd ones
        check_trace("credit", sender, *po::local_word(team, po::grant_place(team, place)));
      }
      for (uint64_t i = 0; i < team.ready_stride; ++i) {
        check_trace("sliceRdy word", sender, *po::local_word(team, po::ready_word_offset(team, sender, i)));
      }
    }
  }

  // In recovery: brings the operator's own memory, results among it, back to what it is before a launch.
  virtual void clear() {}

  // ---- of the world ----

  virtual bool is_reachable(int pe) const { return !is_staged() || pe / number("--node") == rank / number("--node"); }

  // On a busy machine a PE may be late by more than a wait for one that never comes should last.
  virtual int64_t timeout_ms(bool is_trouble) const {
    constexpr int64_t kMinute = 60000;
    return is_trouble || trouble_at() < 0 ? number("--timeout-ms") : kMinute;
  }

  virtual bool somebody_stays_away() const { return number("--stop-pe") >= 0; }

  virtual void before_launch(int64_t) {
    if (rank == number("--slow-pe")) usleep(static_cast<useconds_t>(number("--slow-us")));
  }

  // A PE stays away from a launch or comes to it under another contract. The launch, and some after it, end.
  virtual void go_through_trouble(int64_t launch) {
    if (rank == number("--stop-pe")) return;
    for (int64_t i = 0; i <= number("--queued"); ++i) {
      run_kernel(launch + i);
      if (error.state == 0 || error.epoch != local.abort || error.epoch + static_cast<uint64_t>(i) != local.epoch) {
        fail(kWrongReport, "PE %d, launch %ld: did not notice the trouble, or not as it should", rank, launch + i);
      }
      check_given_up(launch + i);
    }
  }

  // ---- for the operator ----

  int64_t number(const char* option) const { return world.options.number(option); }
  bool is_staged() const { return size > 1 && number("--staged") != 0; }
  int64_t trouble_at() const { return world.options.has("--trouble-at") ? number("--trouble-at") : -1; }
  bool is_trouble_at(int64_t launch) const { return launch == trouble_at(); }

  // Sets aside room in the heap, with a guard after it; returns its offset.
  uint64_t take(uint64_t bytes) {
    const uint64_t offset = heap_bytes;
    heap_bytes += (bytes + 127) / 128 * 128;
    guards.push_back(heap_bytes);
    heap_bytes += kGuardBytes;
    return offset;
  }

  // When all is taken.
  void allocate_heap() {
    heap = static_cast<uint8_t*>(std::aligned_alloc(128, heap_bytes));
    std::memset(heap, 0, heap_bytes);
    for (const uint64_t guard : guards) std::memset(heap + guard, kGuard, kGuardBytes);
    plan.team.heap = heap;
    world.heaps[static_cast<size_t>(rank)] = heap;
  }

  // The plan for a launch, under the contract that this PE comes with.
  Plan plan_of(int64_t launch) const {
    Plan used = plan;
    if (is_other(launch) && number("--other-call") == 0) set_contract(used, 1);
    return used;
  }

  // The number of a launch's call, where the operator has them.
  uint64_t call_of(int64_t launch) const {
    return static_cast<uint64_t>(launch + 1 + (is_other(launch) && number("--other-call") != 0 ? 1 : 0));
  }

  template <class Kernel>
  void launch_on_host(const Plan& used, const typename Kernel::Call& call, int64_t more_wgs = 0) const {
    const auto wgs = static_cast<int>(number("--wgs") + more_wgs);
    if (!po::run_on_host<Kernel>(&used, call, wgs, static_cast<int>(number("--threads")))) {
      fail(kNoThreads, "PE %d: the system has no room for threads", rank);
    }
    if (input_error.state != 0) fail(kWrongReport, "PE %d: good input was reported as bad", rank);
  }

  void check_trace(const char* what, int sender, uint64_t flag) const {
    const uint64_t last = world.epochs[static_cast<size_t>(sender)];
    if (po::epoch_of(flag) <= last) return;
    fail(kTookPart, "PE %d: a %s from PE %d has epoch %lu, but that PE gave up in %lu", rank, what, sender,
         po::epoch_of(flag), last);
  }

  [[noreturn]] void fail_with_record(Exit status, int64_t launch) const {
    fail(status, "PE %d, launch %ld: aborted: kind %lu, phase %lu, peer %lu, index %lu, epoch %lu, saw 0x%lx", rank,
         launch, error.kind, error.phase, error.peer, error.index, error.epoch, error.seen);
  }

  World& world;
  const int rank;
  const int size;
  Plan plan{};
  uint8_t* heap = nullptr;
  po::LocalState local{};
  po::ErrorRecord error{};
  po::InputErrorRecord input_error{};
  std::vector<uint64_t> host_says;   // by PE: nothing
  std::vector<uint64_t> peer_heaps;  // as mapped here; 0: not reachable

 private:
  bool is_other(int64_t launch) const { return is_trouble_at(launch) && rank == number("--other-pe"); }

  static void set_contract(Plan& used, int64_t variant) {
    for (int i = 0; i < po::kContractWords; ++i) used.team.contract[i] = 1000 + i + variant;
    used.team.contract_hash = static_cast<uint64_t>(0x5a5a + variant);
  }

  // What the host does to start again: no PE is in a launch, then nothing is under way, then all are clean.
  void recover() {
    world.epochs[static_cast<size_t>(rank)] = error.state != 0 ? error.epoch : local.epoch;
    world.meeting.arrive_and_wait();
    network->quiet();
    world.meeting.arrive_and_wait();
    check_traces();
    const uint64_t last = *std::max_element(world.epochs.begin(), world.epochs.end());
    std::memset(heap + plan.team.abort_offset, 0, static_cast<size_t>(size) * sizeof(uint64_t));
    clear();
    local = {};
    local.epoch = last + static_cast<uint64_t>(number("--queued")) + 2;
    error.state = 0;
    world.meeting.arrive_and_wait();
  }

  static constexpr uint8_t kGuard = 0xa5;
  static constexpr uint64_t kGuardBytes = 128;
  static constexpr uint64_t kUnusedBytes = 1 << 16;

  uint64_t heap_bytes = 0;
  std::vector<uint64_t> guards;
  std::unique_ptr<po::DelayedNetwork> network;
};

// ---- all PEs --------------------------------------------------------------------------------------------------------

// A driver's main: a world of PEs, each made of the world and its rank, and a thread for each.
template <class Pe>
int run(int argc, char** argv, Options& options) {
  options.parse(argc, argv);
  typename Pe::World world(options);
  std::vector<std::unique_ptr<Pe>> pes;
  for (int rank = 0; rank < world.size; ++rank) pes.push_back(std::make_unique<Pe>(world, rank));
  for (auto& pe : pes) pe->connect();
  std::vector<std::thread> threads;
  for (auto& pe : pes) threads.emplace_back([&pe] { pe->run(); });
  for (std::thread& thread : threads) thread.join();
  for (auto& pe : pes) pe->close();
  for (auto& pe : pes) pe->check_remains();
  return kAsExpected;
}

}  // namespace driver
