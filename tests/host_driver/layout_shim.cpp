// Prints where the fields of the structs lie that Python fills or reads: "struct NAME SIZE", then "NAME OFFSET SIZE". A
// field of a part of a struct has the name that the mirror, which knows no parts, gives it.
#include <cstddef>
#include <cstdio>

#include "kernels/embedding_all_to_all.cuh"
#define PO_SUM_SCALAR Float32
#define PO_VECTORS 1
#define PO_DEPTH 8
#define PO_ALIGNED true
#define PO_RESIDENT true
#define PO_TWO_PHASE false
#define PO_PREFETCHES false
#define PO_LETS_IN kAtOnce
#define PO_WARPS 8
#include "kernels/gemv_all_reduce.cuh"
#define PO_GATHERS false
#define PO_LANES 32
#define PO_BYTES 16
#include "kernels/sparse_all_reduce.cuh"

#define STRUCT(type) (std::printf("struct %s %zu\n", #type, sizeof(type)))
#define FIELD(type, name) (std::printf("%s %zu %zu\n", #name, offsetof(type, name), sizeof(type::name)))
#define PART_FIELD(type, name, place) \
  (std::printf("%s %zu %zu\n", #name, offsetof(type, place), sizeof(static_cast<type*>(nullptr)->place)))
#define CONSTANT(name) (std::printf("constant %s %lld\n", #name, static_cast<long long>(name)))

using namespace po;
using embedding_all_to_all::Call;
using embedding_all_to_all::Plan;
using embedding_all_to_all::Table;
using GemvCall = gemv_all_reduce::Call;
using GemvPlan = gemv_all_reduce::Plan;
using SparseCall = sparse_all_reduce::Call;
using SparsePlan = sparse_all_reduce::Plan;
using SparseReport = sparse_all_reduce::Report;

int main() {
  CONSTANT(kMaxPes);
  CONSTANT(kContractWords);
  CONSTANT(kEpochShift);
  CONSTANT(kBlameKindShift);
  CONSTANT(kCallWords);
  CONSTANT(kReportedByPeer);
  CONSTANT(kPhaseRows);
  CONSTANT(kTileRows);
  CONSTANT(sizeof(Packet));
  CONSTANT(kRowsPerWord);
  CONSTANT(kNumMeetings);
  CONSTANT(HotList::kMost);
  CONSTANT(sizeof(HotList));

  STRUCT(Grant);
  FIELD(Grant, flag);
  FIELD(Grant, output_offset);
  FIELD(Grant, contract);

  STRUCT(LocalState);
  FIELD(LocalState, epoch);
  FIELD(LocalState, ticket);
  FIELD(LocalState, departed);
  FIELD(LocalState, abort);
  FIELD(LocalState, error_claimed);
  FIELD(LocalState, input_error_claimed);
  FIELD(LocalState, lost);
  FIELD(LocalState, preparing);

  STRUCT(ErrorRecord);
  FIELD(ErrorRecord, state);
  FIELD(ErrorRecord, kind);
  FIELD(ErrorRecord, phase);
  FIELD(ErrorRecord, peer);
  FIELD(ErrorRecord, index);
  FIELD(ErrorRecord, epoch);
  FIELD(ErrorRecord, seen);
  FIELD(ErrorRecord, waited_ns);
  FIELD(ErrorRecord, own_contract);
  FIELD(ErrorRecord, peer_contract);

  STRUCT(InputErrorRecord);
  FIELD(InputErrorRecord, state);
  FIELD(InputErrorRecord, kind);
  FIELD(InputErrorRecord, table);
  FIELD(InputErrorRecord, bag);
  FIELD(InputErrorRecord, value);
  FIELD(InputErrorRecord, limit);

  STRUCT(Team);
  FIELD(Team, rank);
  FIELD(Team, size);
  FIELD(Team, heap);
  FIELD(Team, peer_heaps);
  FIELD(Team, grants_offset);
  FIELD(Team, ready_offset);
  FIELD(Team, abort_offset);
  FIELD(Team, ready_stride);
  FIELD(Team, local);
  FIELD(Team, wg_done);
  FIELD(Team, error);
  FIELD(Team, input_error);
  FIELD(Team, timeout_ns);
  FIELD(Team, contract_hash);
  FIELD(Team, contract);
  FIELD(Team, network);
  FIELD(Team, epoch);

  STRUCT(ExchangeOrder);
  FIELD(ExchangeOrder, rank);
  FIELD(ExchangeOrder, size);
  FIELD(ExchangeOrder, num_tables);
  FIELD(ExchangeOrder, slice_samples);
  FIELD(ExchangeOrder, batch_start);
  FIELD(ExchangeOrder, num_rounds);
  FIELD(ExchangeOrder, local_delay);
  FIELD(ExchangeOrder, oblivious);
  FIELD(ExchangeOrder, slice_major);

  STRUCT(Table);
  FIELD(Table, rows);
  FIELD(Table, num_rows);
  FIELD(Table, row_bytes);
  FIELD(Table, column_bytes);
  FIELD(Table, shape);

  STRUCT(Plan);
  FIELD(Plan, team);
  FIELD(Plan, order);
  FIELD(Plan, tables);
  FIELD(Plan, column_start);
  FIELD(Plan, batch);
  FIELD(Plan, output_row_bytes);
  FIELD(Plan, staging_offset);
  FIELD(Plan, reports_bad_input);

  STRUCT(Call);
  FIELD(Call, indices);
  FIELD(Call, offsets);
  FIELD(Call, weights);
  FIELD(Call, num_indices);
  FIELD(Call, output_offset);

  STRUCT(GemvPlan);
  FIELD(GemvPlan, team);
  PART_FIELD(GemvPlan, num_tiles, output.num_tiles);
  PART_FIELD(GemvPlan, output_stride, output.stride);
  PART_FIELD(GemvPlan, bias, output.bias);
  PART_FIELD(GemvPlan, partials_offset, packets.partials_offset);
  PART_FIELD(GemvPlan, partials_bytes, packets.partials_bytes);
  PART_FIELD(GemvPlan, results_offset, packets.results_offset);
  PART_FIELD(GemvPlan, results_bytes, packets.results_bytes);
  PART_FIELD(GemvPlan, all_reachable, packets.all_reachable);
  PART_FIELD(GemvPlan, heaps, packets.heaps);
  FIELD(GemvPlan, asked);

  STRUCT(GemvCall);
  FIELD(GemvCall, weight);
  FIELD(GemvCall, vectors);
  FIELD(GemvCall, output);
  FIELD(GemvCall, residual);
  FIELD(GemvCall, shape);

  STRUCT(RowSets);
  FIELD(RowSets, num_rows);
  FIELD(RowSets, num_words);
  FIELD(RowSets, planes_offset);
  FIELD(RowSets, headers_offset);
  FIELD(RowSets, first_entry);
  FIELD(RowSets, totals);
  FIELD(RowSets, met);

  STRUCT(SparsePlan);
  FIELD(SparsePlan, team);
  FIELD(SparsePlan, sets);
  FIELD(SparsePlan, row_bytes);
  FIELD(SparsePlan, capacity);
  FIELD(SparsePlan, progress_offset);
  FIELD(SparsePlan, num_workers);
  FIELD(SparsePlan, gather_offset);
  FIELD(SparsePlan, low_offset);
  FIELD(SparsePlan, rows_out);
  FIELD(SparsePlan, num_rows_out);
  FIELD(SparsePlan, num_entries);
  FIELD(SparsePlan, hot);
  FIELD(SparsePlan, report);
  FIELD(SparsePlan, splits_partials);
  FIELD(SparsePlan, reports_overflow);
  FIELD(SparsePlan, divisor);
  FIELD(SparsePlan, all_reachable);

  STRUCT(SparseCall);
  FIELD(SparseCall, rows);
  FIELD(SparseCall, order);
  FIELD(SparseCall, values);
  FIELD(SparseCall, num_entries);
  FIELD(SparseCall, output_offset);

  STRUCT(SparseReport);
  FIELD(SparseReport, state);
  FIELD(SparseReport, num_rows);
  FIELD(SparseReport, num_shares);
  FIELD(SparseReport, phase_ns);
  return 0;
}
