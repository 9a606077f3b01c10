// The order of a PE's tasks in an all-to-all: one pure function from a position to a task.
//
// The output for each destination is cut into slices of `slice_samples` samples; a task is one (slice, table).
//
// Communication-aware, for S PEs: round q holds task q of every remote destination, starting with the next PE, so that
// all links of all PEs carry data all the time and no peer is flooded. This PE's own tasks join `local_delay` rounds
// later, so the last `local_delay` of them run after everything that travels. A delay of all rounds is the paper's
// order (what travels first); a short one keeps memory and links busy together.
//
// A destination's tables come one after the other, or in two sequences beside one another: the first `num_beside`
// tables, which have many lookups for the bytes that they send, and the others, which have few. Tasks of the two are
// mixed evenly from the first to the last, so that memory and links are busy together.
//
// Oblivious: destination 0 first, on every PE, as the logical grid numbers its WGs.
#pragma once

#include "platform/describe.cuh"

namespace po {

struct Task {
  int destination = 0;
  int64_t slice = 0;
  int64_t table = 0;
};

struct ExchangeOrder {
  int32_t rank;
  int32_t size;
  int64_t num_tables;
  int64_t slice_samples;
  const int64_t* batch_start;  // [size + 1] first sample of each destination
  int64_t num_rounds;          // remote rounds: the most tasks that any remote destination has
  int64_t local_delay;         // at most num_rounds
  int32_t oblivious;
  int32_t slice_major;  // finish slices early (staged puts) instead of tables (rows reused in the cache)
  // 0: one sequence of tables, as always if oblivious or slice_major. Otherwise num_tables is below 2^16.
  uint32_t num_beside;

  PO_FN int64_t num_samples(int destination) const { return batch_start[destination + 1] - batch_start[destination]; }
  PO_FN int64_t num_slices(int destination) const { return ceil_div(num_samples(destination), slice_samples); }
  PO_FN int64_t num_tasks(int destination) const { return num_slices(destination) * num_tables; }

  // Positions before this one hold all tasks whose output leaves the PE.
  PO_FN int32_t num_leading() const {
    if (oblivious) return num_positions();
    return static_cast<int32_t>(num_rounds * (size - 1) + max_of<int64_t>(num_rounds - local_delay, 0));
  }

  // Positions are 32-bit numbers; the plan refuses more.
  PO_FN int32_t num_positions() const {
    if (oblivious) {
      int64_t total = 0;
      for (int destination = 0; destination < size; ++destination) total += num_tasks(destination);
      return static_cast<int32_t>(total);
    }
    return num_leading() + static_cast<int32_t>(max_of<int64_t>(num_tasks(rank) - (num_rounds - local_delay), 0));
  }

  // Returns false if the position holds no task (the destinations' shares differ).
  PO_FN bool task_at(int32_t position, Task* task) const {
    int64_t index;
    if (oblivious) {
      task->destination = 0;
      index = position;
      while (index >= num_tasks(task->destination)) index -= num_tasks(task->destination++);
    } else {
      // Rounds without own tasks, rounds with own tasks, then the remaining own tasks.
      const int num_peers = size - 1;
      const auto early = static_cast<int32_t>(local_delay) * num_peers;
      int slot;
      if (position < early) {
        slot = position % num_peers;
        index = position / num_peers;
      } else if (position < num_leading()) {
        slot = (position - early) % size;
        index = (position - early) / size + local_delay;
      } else {
        slot = num_peers;
        index = position - num_leading() + num_rounds;
      }
      const int next = rank + 1 + slot;
      task->destination = next < size ? next : next - size;
      if (slot == num_peers) index -= local_delay;
      if (index >= num_tasks(task->destination)) return false;
    }
    auto number = static_cast<uint32_t>(index);
    uint32_t first_table = 0;
    if (num_beside != 0) {
      // Of every num_tables consecutive tasks, num_beside are of the first sequence.
      const auto all = static_cast<uint32_t>(num_tables);
      const uint32_t beside = num_beside;
      const uint32_t turn = number / all;
      const uint32_t due = number % all * beside;  // tasks of that sequence, times `all`
      const uint32_t before = turn * beside + due / all;
      const bool is_beside = due % all + beside >= all;
      number = is_beside ? before : number - before;
      first_table = is_beside ? 0 : beside;
    }
    const auto fast = static_cast<uint32_t>(slice_major ? num_tables : num_slices(task->destination));
    const uint32_t slow_index = number / fast;
    const uint32_t fast_index = number % fast;
    task->slice = slice_major ? slow_index : fast_index;
    task->table = slice_major ? fast_index : first_table + slow_index;
    return true;
  }
};
PO_DESCRIBE(ExchangeOrder, rank, size, num_tables, slice_samples, batch_start, num_rounds, local_delay, oblivious,
            slice_major, num_beside)

}  // namespace po
