// What the drivers share: their options, how they fail, and all PEs at work as threads of one process.
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
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "comm/team.cuh"
#include "exits.h"

namespace driver {

[[noreturn]] inline void fail(Exit status, const char* format, ...) {
  static std::mutex mutex;
  mutex.lock();  // never released: the first failure is the one that is told
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

// --name=value; a name that has no default is none.
class Options {
 public:
  explicit Options(std::map<std::string, std::string> defaults) : values_(std::move(defaults)) {}

  void parse(int argc, char** argv) {
    for (int i = 1; i < argc; ++i) {
      const std::string argument = argv[i];
      const size_t equals = argument.find('=');
      const std::string name = argument.substr(0, equals);
      if (equals == std::string::npos || values_.find(name) == values_.end()) {
        fail(kBadOption, "unknown option %s", argument.c_str());
      }
      values_[name] = argument.substr(equals + 1);
    }
  }

  const std::string& text(const std::string& name) const { return values_.at(name); }
  int64_t number(const std::string& name) const { return std::stoll(values_.at(name)); }

  std::vector<int64_t> list(const std::string& name) const {
    std::vector<int64_t> numbers;
    const std::string& value = values_.at(name);
    for (size_t begin = 0; begin < value.size();) {
      const size_t end = std::min(value.find(',', begin), value.size());
      numbers.push_back(std::stoll(value.substr(begin, end - begin)));
      begin = end + 1;
    }
    return numbers;
  }

 private:
  std::map<std::string, std::string> values_;
};

// Waits until a condition holds. What it looks at must be atomic and relaxed: waiting then orders nothing that the sanitizer
// knows of, so it hides no race.
template <class Condition>
void wait_until(const Condition& condition) {
  while (!condition()) usleep(200);
}

// Where PEs meet without an order, in that sense, between what they do before and behind it.
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

// What PEs share that give a launch up and start again.
struct World {
  explicit World(int size) : meeting(size), start(size), epochs(static_cast<size_t>(size)) {}

  std::barrier<> meeting;
  Meeting start;                 // of a launch that a PE stays away from
  std::vector<uint64_t> epochs;  // of each PE: the last launch that it may have taken part in
};

// What the host does to start again: no PE is in a launch, then nothing is under way, then all are clean.
// `queued`: launches behind the one that was given up.
template <class Pe>
void recover(Pe& pe, int64_t queued) {
  std::vector<uint64_t>& epochs = pe.world.epochs;
  epochs[static_cast<size_t>(pe.rank)] = pe.error.state != 0 ? pe.error.epoch : pe.local.epoch;
  pe.world.meeting.arrive_and_wait();
  pe.network->quiet();
  pe.world.meeting.arrive_and_wait();
  pe.check_traces();
  const uint64_t epoch = *std::max_element(epochs.begin(), epochs.end()) + static_cast<uint64_t>(queued) + 2;
  std::memset(pe.heap + pe.plan.team.abort_offset, 0, static_cast<size_t>(pe.size) * 8);
  pe.local = {};
  pe.local.epoch = epoch;
  pe.error.state = 0;
  pe.world.meeting.arrive_and_wait();
}

// Nothing in a PE's heap may be from a launch behind the one that its sender gave up.
template <class Pe>
void check_trace(const Pe& pe, const char* what, int sender, uint64_t flag) {
  const uint64_t last = pe.world.epochs[static_cast<size_t>(sender)];
  if (po::epoch_of(flag) <= last) return;
  fail(kTookPart, "PE %d: a %s from PE %d has epoch %lu, but that PE gave up in %lu", pe.rank, what, sender,
       po::epoch_of(flag), last);
}

// The same of the words that all operators have.
template <class Pe>
void check_words(const Pe& pe) {
  const po::Team& team = pe.plan.team;
  for (int sender = 0; sender < pe.size; ++sender) {
    check_trace(pe, "credit", sender, *po::local_word(team, po::grant_offset(team, sender)));
    for (uint64_t i = 0; i < team.ready_stride; ++i) {
      check_trace(pe, "sliceRdy word", sender, *po::local_word(team, po::ready_word_offset(team, sender, i)));
    }
  }
}

template <class Pe>
void run_side_by_side(const std::vector<std::unique_ptr<Pe>>& pes) {
  std::vector<std::thread> threads;
  for (const auto& pe : pes) threads.emplace_back([&pe] { pe->run(); });
  for (std::thread& thread : threads) thread.join();
}

// A driver's main: PEs made by make(rank, size), each connected with all.
template <class Make>
int run(int argc, char** argv, Options& options, const Make& make) {
  options.parse(argc, argv);
  const auto size = static_cast<int>(options.number("--pes"));
  std::vector<decltype(make(0, size))> pes;
  for (int rank = 0; rank < size; ++rank) pes.push_back(make(rank, size));
  for (auto& pe : pes) pe->connect(pes);
  run_side_by_side(pes);
  for (auto& pe : pes) pe->network.reset();
  for (auto& pe : pes) std::free(pe->heap);
  return 0;
}

}  // namespace driver
