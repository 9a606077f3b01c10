// C entry to ExchangeOrder, for tests.
#include "sched/exchange_order.cuh"

// Writes (destination, slice, table) of every position to `tasks`, destination -1 where the position holds none. Returns
// the number of positions, or -1 if `capacity` is less.
extern "C" int64_t list_tasks(const po::ExchangeOrder* order, int64_t capacity, int64_t* tasks) {
  const int64_t count = order->num_positions();
  if (count > capacity) return -1;
  for (int64_t position = 0; position < count; ++position, tasks += 3) {
    po::Task task{-1, -1, -1};
    const bool found = order->task_at(static_cast<int32_t>(position), &task);
    tasks[0] = found ? task.destination : -1;
    tasks[1] = task.slice;
    tasks[2] = task.table;
  }
  return count;
}

extern "C" int64_t num_leading(const po::ExchangeOrder* order) { return order->num_leading(); }
