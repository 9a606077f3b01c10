// The optimizer's step, or the sum alone, for one row whose gradients are added up (gradient_sums.cuh). A group of
// lanes holds the row, or a part of a wide row, in registers: a tile holds a row of a window, the whole warp a row with
// more lookups. A chunk is 16 bytes of the row, and the same columns of gradients and states.
#pragma once

#include "kernels/embedding_backward/gradient_sums.cuh"
#include "platform/random.cuh"
#include "platform/streaming.cuh"

namespace po::embedding_backward {

// `Lanes` hold the row. `kEarly`: a row of one part is loaded while its gradients are added up.
template <class Traits, class Lanes, bool kEarly>
class RowUpdate {
 public:
  using Window = LookupWindow<Traits>;
  static constexpr int kElements = Traits::kElements;
  using Sums = GradientSums<Traits, Lanes, kElements>;
  using Columns = typename Sums::Columns;
  static constexpr int kLaneChunks = Sums::kLaneChunks;
  static constexpr bool kIsRowwise = Traits::kStep == Step::kRowwiseAdagrad;
  static constexpr bool kIsStochastic = Traits::kRounding == Rounding::kStochastic;
  static constexpr bool kUpdates = Traits::kStep != Step::kGradient;

  PO_FN RowUpdate(const Plan& plan, const Call& call) : plan_(plan), call_(call) {}

  static PO_FN Rates rates(const Plan& plan, const Call& call) {
    Rates rates{kUpdates ? *call.rate : 0.0f, call.scale == nullptr ? 1.0f : *call.scale, 1.0f, 1.0f, 0};
    if constexpr (Traits::kStep == Step::kAdam) {
      rates.correction1 = 1 - rounded_product(call.beta_powers[0], plan.beta1);
      rates.correction2 = 1 - rounded_product(call.beta_powers[1], plan.beta2);
    }
    if constexpr (kIsStochastic) rates.number = static_cast<uint32_t>(*call.step_count);
    return rates;
  }

  PO_FN const Lanes& lanes() const { return lanes_; }
  PO_FN const Sums& sums() const { return sums_; }

  // Updates a row whose first lookup is number `first` of the sorted ones. `sum_of(part, sums)` adds up a part's
  // gradients.
  template <class SumOf>
  PO_FN void finish(const GroupView& view, int64_t row, int first, const SumOf& sum_of) const {
    if constexpr (kUpdates) {
      update(view, row, sum_of);
    } else {
      write_sums(view, row, first, sum_of);
    }
  }

  // For the window's lookups first, first + stride, ...: writes the product of the bag's gradient and the row before
  // its update. The window's first lookup is number `begin` of the sorted ones.
  PO_FN void differentiate_factors(const GroupView& view, int64_t row, const Window& window, int begin, int first,
                                   int last, int stride) const {
    PO_NO_UNROLL
    for (int at = first; at < last; at += stride) {
      float total = 0.0f;
      PO_NO_UNROLL
      for (int part = 0; part < Sums::num_parts(view); ++part) {
        float sums[kLaneChunks];
        PO_UNROLL
        for (int i = 0; i < kLaneChunks; ++i) {
          sums[i] = 0.0f;
          const int element = sums_.element_of(part, i);
          const int left = view.width - element;
          float rows[kElements];
          float gradients[kElements];
          const int64_t place = row * view.width + element;
          to_floats<Scalar>(load_chunk<Storage, Traits::kIsAligned>(view.rows, place, left), rows);
          to_floats<Wire>(Sums::load_gradient(window.gradients[at], element, left), gradients);
          PO_UNROLL
          for (int e = 0; e < kElements; ++e) {
            if (is_column(e, left)) sums[i] += rounded_product(rows[e], gradients[e]);
          }
        }
        total = sum_by_trees(lanes_, sums, total);
      }
      if (lanes_.rank() == 0) call_.factor_gradients[call_.lookups[begin + at]] = total;
    }
  }

 private:
  using Scalar = typename Traits::Scalar;
  using Storage = typename Scalar::Storage;
  using Wire = typename Traits::Wire;
  using Chunk = Vector<kChunkBytes>;
  static constexpr bool kHasStates = Traits::kStep == Step::kAdagrad || Traits::kStep == Step::kAdam;
  struct None {};

  // Factors of row-wise Adagrad: for a row's gradient, and then for the row.
  struct RowFactors {
    float rate = 0.0f;
    float shrinkage = 1.0f;
  };

  // A part of a row as it is before the step.
  struct Old {
    Chunk row[kLaneChunks];
    std::conditional_t<kHasStates, Columns, None> state;
    std::conditional_t<Traits::kStep == Step::kAdam, Columns, None> second;
  };

  // Whether an element of a chunk belongs to the row. With aligned rows, all elements of a chunk do, or none.
  static PO_FN bool is_column(int e, int left) { return (Traits::kIsAligned ? 0 : e) < left; }

  PO_FN Old load_old(const GroupView& view, int64_t row, int part) const {
    Old old;
    PO_UNROLL
    for (int i = 0; i < kLaneChunks; ++i) {
      const int element = sums_.element_of(part, i);
      old.row[i] = load_once<Storage, Traits::kIsAligned>(view.rows, row * view.width + element, view.width - element);
    }
    if constexpr (kHasStates) sums_.load(view, part, view.state, row * view.width, old.state);
    if constexpr (Traits::kStep == Step::kAdam) {
      sums_.load(view, part, view.second, row * view.width, old.second);
    }
    return old;
  }

  template <class SumOf>
  PO_FN void update(const GroupView& view, int64_t row, const SumOf& sum_of) const {
    RowFactors factors;
    [[maybe_unused]] const float row_state = load_row_state(view, row);
    if constexpr (!Traits::kHasWideRows) {
      Old old;
      if constexpr (kEarly) old = load_old(view, row, 0);
      Columns sums = {};
      sum_of(0, sums);
      if constexpr (!kEarly) old = load_old(view, row, 0);
      scale(view, sums);
      if constexpr (kIsRowwise) factors.rate = row_rate(view, row, row_state, add_squares(view, 0, old, sums, 0.0f));
      if constexpr (Traits::kHasMaxNorm) {
        factors.shrinkage = shrinkage(add_stepped_squares(view, 0, old, sums, factors.rate, 0.0f));
      }
      step(view, row, 0, old, sums, factors);
    } else {
      const auto for_parts = [&](const auto& act) {
        PO_NO_UNROLL
        for (int part = 0; part < Sums::num_parts(view); ++part) {
          Columns sums = {};
          sum_of(part, sums);
          scale(view, sums);
          act(part, load_old(view, row, part), sums);
        }
      };
      if constexpr (kIsRowwise) {
        float squares = 0.0f;
        for_parts([&](int part, const Old& old, const Columns& sums) {
          squares = add_squares(view, part, old, sums, squares);
        });
        factors.rate = row_rate(view, row, row_state, squares);
      }
      if constexpr (Traits::kHasMaxNorm) {
        float squares = 0.0f;
        for_parts([&](int part, const Old& old, const Columns& sums) {
          squares = add_stepped_squares(view, part, old, sums, factors.rate, squares);
        });
        factors.shrinkage = shrinkage(squares);
      }
      for_parts([&](int part, const Old& old, const Columns& sums) { step(view, row, part, old, sums, factors); });
    }
  }

  template <class SumOf>
  PO_FN void write_sums(const GroupView& view, int64_t row, int first, const SumOf& sum_of) const {
    const int64_t place = call_.places == nullptr ? row * view.width : call_.places[first];  // @place-of-the-row
    PO_NO_UNROLL
    for (int part = 0; part < Sums::num_parts(view); ++part) {
      Columns sums = {};
      sum_of(part, sums);
      scale(view, sums);
      PO_UNROLL
      for (int i = 0; i < kLaneChunks; ++i) sums_.store_once(view, part, i, view.state, place, sums.values[i]);
    }
    if (call_.touched != nullptr && lanes_.rank() == 0) call_.touched[view.first_key + row] = 1.0f;
  }

  static PO_FN void scale(const GroupView& view, Columns& sums) {
    PO_UNROLL
    for (auto& chunk : sums.values) {
      PO_UNROLL
      for (float& value : chunk) value *= view.rates.scale;
    }
  }

  // Adds the squares of the part's columns, with weight decay if it is a part of the gradient.
  PO_FN float add_squares(const GroupView& view, int part, const Old& old, const Columns& sums, float total) const {
    float squares[kLaneChunks];
    PO_UNROLL
    for (int i = 0; i < kLaneChunks; ++i) {
      squares[i] = 0.0f;
      float rows[kElements];
      if constexpr (Traits::kDecay == Decay::kL2) to_floats<Scalar>(old.row[i], rows);
      PO_UNROLL
      for (int e = 0; e < kElements; ++e) {
        float value = sums.values[i][e];
        if constexpr (Traits::kDecay == Decay::kL2) value += rounded_product(plan_.weight_decay, rows[e]);
        if (is_column(e, view.width - sums_.element_of(part, i))) squares[i] += rounded_product(value, value);
      }
    }
    return sum_by_trees(lanes_, squares, total);
  }

  // Loaded before the row's gradients are added up, since it is needed as soon as these are squared.
  PO_FN float load_row_state(const GroupView& view, int64_t row) const {
    if constexpr (kIsRowwise) return view.state[row];
    return 0.0f;
  }

  // Adds the squares to the row's state, which was `state`. Returns the factor of the row's gradient.
  PO_FN float row_rate(const GroupView& view, int64_t row, float state, float squares) const {
    float rate = 0.0f;
    if (lanes_.rank() == 0) {
      const float sum = state + rounded_product(squares, view.inverse_width);
      view.state[row] = sum;
      rate = view.rates.rate / (square_root(sum) + plan_.eps);
    }
    return lanes_.shuffle(rate, 0);
  }

  // Adds the squares of the part's columns after row-wise Adagrad's step.
  PO_FN float add_stepped_squares(const GroupView& view, int part, const Old& old, const Columns& sums, float rate,
                                  float total) const {
    float squares[kLaneChunks];
    PO_UNROLL
    for (int i = 0; i < kLaneChunks; ++i) {
      squares[i] = 0.0f;
      float rows[kElements];
      to_floats<Scalar>(old.row[i], rows);
      step_rowwise(view, sums.values[i], rate, rows);
      PO_UNROLL
      for (int e = 0; e < kElements; ++e) {
        if (is_column(e, view.width - sums_.element_of(part, i))) squares[i] += rounded_product(rows[e], rows[e]);
      }
    }
    return sum_by_trees(lanes_, squares, total);
  }

  // The factor that brings the norm of a row with this sum of squares down to max_norm.
  PO_FN float shrinkage(float squares) const {
    const float norm = square_root(squares);
    return norm > plan_.max_norm ? plan_.max_norm / norm : 1.0f;
  }

  PO_FN void step(const GroupView& view, int64_t row, int part, const Old& old, const Columns& sums,
                  const RowFactors& factors) const {
    const int64_t first = row * view.width;
    PO_UNROLL
    for (int i = 0; i < kLaneChunks; ++i) {
      const int element = sums_.element_of(part, i);
      float rows[kElements];
      to_floats<Scalar>(old.row[i], rows);
      if constexpr (Traits::kStep == Step::kSgd) {
        PO_UNROLL
        for (int e = 0; e < kElements; ++e) rows[e] -= rounded_product(view.rates.rate, sums.values[i][e]);
      } else if constexpr (kIsRowwise) {
        step_rowwise(view, sums.values[i], factors.rate, rows);
        if constexpr (Traits::kHasMaxNorm) {
          PO_UNROLL
          for (float& value : rows) value *= factors.shrinkage;
        }
      } else {
        step_by_element(view, i, part, first, old, sums.values[i], rows);
      }
      const Chunk stored = rounded(view, row, element, rows);
      store_once<Storage, Traits::kIsAligned>(view.rows, first + element, view.width - element, stored);
    }
  }

  // A chunk's random bits depend only on the table, the step, the row and the columns.
  PO_FN Chunk rounded(const GroupView& view, int64_t row, int element, const float (&values)[kElements]) const {
    Storage stored[kElements];
    if constexpr (kIsStochastic) {
      const RandomWords counter{{static_cast<uint32_t>(row), static_cast<uint32_t>(row >> 32),
                                 static_cast<uint32_t>(element / kElements), view.rates.number}};
      const RandomWords random = philox(counter, view.seed);
      PO_UNROLL
      for (int e = 0; e < kElements; ++e) stored[e] = Scalar::round_stochastically(values[e], random.half(e));
    } else {
      PO_UNROLL
      for (int e = 0; e < kElements; ++e) stored[e] = Scalar::from_float(values[e]);
    }
    Chunk chunk;
    __builtin_memcpy(&chunk, stored, sizeof(chunk));
    return chunk;
  }

  PO_FN void step_rowwise(const GroupView& view, const float (&gradients)[kElements], float multiplier,
                          float (&rows)[kElements]) const {
    const float decay = Traits::kDecay == Decay::kNone ? 0.0f
                        : Traits::kDecay == Decay::kL2 ? rounded_product(multiplier, plan_.weight_decay)
                                                       : rounded_product(view.rates.rate, plan_.weight_decay);
    PO_UNROLL
    for (int e = 0; e < kElements; ++e) {
      const float kept = Traits::kDecay == Decay::kNone ? rows[e] : rounded_product(1.0f - decay, rows[e]);
      rows[e] = kept - rounded_product(multiplier, gradients[e]);
    }
  }

  PO_FN void step_by_element(const GroupView& view, int i, int part, int64_t first, const Old& old,
                             const float (&gradients)[kElements], float (&rows)[kElements]) const {
    float states[kElements];
    if constexpr (Traits::kStep == Step::kAdagrad) {
      PO_UNROLL
      for (int e = 0; e < kElements; ++e) {
        states[e] = old.state.values[i][e] + rounded_product(gradients[e], gradients[e]);
        rows[e] -= rounded_product(view.rates.rate, gradients[e]) / (square_root(states[e]) + plan_.eps);
      }
    }
    if constexpr (Traits::kStep == Step::kAdam) {
      float seconds[kElements];
      PO_UNROLL
      for (int e = 0; e < kElements; ++e) {
        const float gradient = gradients[e];
        states[e] = rounded_product(plan_.beta1, old.state.values[i][e]) + rounded_product(1 - plan_.beta1, gradient);
        seconds[e] = rounded_product(plan_.beta2, old.second.values[i][e]) +
                     rounded_product(rounded_product(1 - plan_.beta2, gradient), gradient);
        const float spread = square_root(seconds[e] / view.rates.correction2) + plan_.eps;
        const float change = states[e] / view.rates.correction1 / spread + rounded_product(plan_.weight_decay, rows[e]);
        rows[e] -= rounded_product(view.rates.rate, change);
      }
      sums_.store_once(view, part, i, view.second, first, seconds);
    }
    sums_.store_once(view, part, i, view.state, first, states);
  }

  const Plan& plan_;
  const Call& call_;
  const Lanes lanes_{};
  const Sums sums_{};
};

}  // namespace po::embedding_backward
