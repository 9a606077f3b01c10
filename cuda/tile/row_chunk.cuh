// A piece of one row's columns in fp32, spread over a group of lanes: read, summed, scaled, stored.
#pragma once

#include "platform/groups.cuh"
#include "platform/scalar.cuh"

namespace po {

// `kBytes`: of an access; `kVectors`: accesses of a lane to a piece.
template <class ScalarType, int kLanes, int kVectorsPerLane, int kVectorBytes>
class RowChunk {
 public:
  using Scalar = ScalarType;
  using Storage = typename Scalar::Storage;
  using Group = Lanes<kLanes>;
  static constexpr int kBytes = kVectorBytes;
  static constexpr int kVectors = kVectorsPerLane;
  static constexpr int kCount = kBytes / static_cast<int>(sizeof(Storage));
  static constexpr int kStrideBytes = Group::kSize * kBytes;
  static constexpr int64_t kChunkBytes = kVectors * kStrideBytes;  // of a row
  static constexpr bool kIsNarrow = sizeof(Storage) == 2;

  // The piece of a row of `row_bytes` that begins at byte `first`.
  PO_FN RowChunk(int64_t first, int64_t row_bytes) : first_(first + Group{}.rank() * kBytes), row_bytes_(row_bytes) {}

  // Sets the chunk to a row that is not written during the launch.
  PO_FN void load(const uint8_t* row) {
    for_each_vector([&](int v, int64_t offset) { set(v, load_vector<kBytes>(row + offset)); });
  }

  // Adds a row.
  PO_FN void add(const uint8_t* row) {
    add_together<1>([&](int) { return row; });
  }

  // Adds the rows row_at(first) to row_at(last - 1), one after the other, with kTogether of them in flight.
  template <int kTogether, class RowAt>
  PO_FN void add_all(int64_t first, int64_t last, const RowAt& row_at) {
    for (; first + kTogether <= last; first += kTogether) {
      add_together<kTogether>([&](int i) { return row_at(first + i); });
    }
    for (; first < last; ++first) add(row_at(first));
  }

  // Sets the chunk to a row that another PE wrote; `low`: null, or the low halves of its fp32 values.
  PO_FN void load_shared(const uint8_t* row, const uint8_t* low) {
    for_each_vector([&](int v, int64_t offset) {
      const Vector<kBytes> vector = load_shared_vector<kBytes>(row + offset);
      if constexpr (kIsNarrow) {
        if (low != nullptr) return set_split(v, vector, load_shared_vector<kBytes>(low + offset));
      }
      set(v, vector);
    });
  }

  PO_FN void add(const RowChunk& other) {
    PO_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      PO_UNROLL
      for (int i = 0; i < kCount; ++i) values_[v][i] += other.values_[v][i];
    }
  }

  PO_FN void divide_by(float divisor) {
    PO_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      PO_UNROLL
      for (int i = 0; i < kCount; ++i) values_[v][i] /= divisor;
    }
  }

  // Rounds to the scalar.
  PO_FN void store(uint8_t* row) const {
    for_each_vector([&](int v, int64_t offset) {
      Storage x[kCount];
      PO_UNROLL
      for (int i = 0; i < kCount; ++i) x[i] = Scalar::from_float(values_[v][i]);
      Vector<kBytes> vector;
      __builtin_memcpy(&vector, x, kBytes);
      store_vector<kBytes>(row + offset, vector);
    });
  }

  // Stores a 16-bit scalar's fp32 values completely: upper halves in one row, lower halves in another.
  PO_FN void store_split(uint8_t* high_row, uint8_t* low_row) const {
    for_each_vector([&](int v, int64_t offset) {
      uint16_t high[kBytes / 2];
      uint16_t low[kBytes / 2];
      PO_UNROLL
      for (int i = 0; i < kCount; ++i) {
        high[i] = static_cast<uint16_t>(float_bits(values_[v][i]) >> 16);
        low[i] = static_cast<uint16_t>(float_bits(values_[v][i]));
      }
      Vector<kBytes> vector;
      __builtin_memcpy(&vector, high, kBytes);
      store_vector<kBytes>(high_row + offset, vector);
      __builtin_memcpy(&vector, low, kBytes);
      store_vector<kBytes>(low_row + offset, vector);
    });
  }

  // Stores the fp32 values themselves; `row` is a row of floats.
  PO_FN void store_floats(uint8_t* row) const {
    for_each_vector([&](int v, int64_t offset) {
      constexpr int kFloatBytes = kBytes < 16 ? kCount * 4 : 16;
      uint8_t* place = row + offset / static_cast<int64_t>(sizeof(Storage)) * 4;
      PO_UNROLL
      for (int part = 0; part < kCount * 4 / kFloatBytes; ++part) {
        Vector<kFloatBytes> vector;
        __builtin_memcpy(&vector, &values_[v][part * kFloatBytes / 4], kFloatBytes);
        store_vector<kFloatBytes>(place + part * kFloatBytes, vector);
      }
    });
  }

  // Sets the chunk to a row of floats.
  PO_FN void load_floats(const uint8_t* row) {
    for_each_float_vector(
        row, [&](float* values, const auto& vector) { __builtin_memcpy(values, &vector, sizeof(vector)); });
  }

  // Adds a row of floats.
  PO_FN void add_floats(const uint8_t* row) {
    for_each_float_vector(row, [&](float* values, const auto& vector) {
      float addends[sizeof(vector) / 4];
      __builtin_memcpy(addends, &vector, sizeof(vector));
      PO_UNROLL
      for (int i = 0; i < static_cast<int>(sizeof(vector) / 4); ++i) values[i] += addends[i];
    });
  }

 private:
  template <int kRows, class RowAt>
  PO_FN void add_together(const RowAt& row_at) {
    Vector<kBytes> vectors[kRows][kVectors] = {};
    PO_UNROLL
    for (int i = 0; i < kRows; ++i) {
      const uint8_t* row = row_at(i);
      for_each_vector([&](int v, int64_t offset) { vectors[i][v] = load_vector<kBytes>(row + offset); });
    }
    PO_UNROLL
    for (int i = 0; i < kRows; ++i) {
      for_each_vector([&](int v, int64_t) {
        Storage x[kCount];
        __builtin_memcpy(x, &vectors[i][v], kBytes);
        PO_UNROLL
        for (int e = 0; e < kCount; ++e) values_[v][e] += Scalar::to_float(x[e]);
      });
    }
  }

  template <class Use>
  PO_FN void for_each_vector(const Use& use) const {
    PO_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      const int64_t offset = first_ + v * kStrideBytes;
      if (offset < row_bytes_) use(v, offset);
    }
  }

  // Calls use(values, vector) with each vector of a row of floats and the corresponding values.
  template <class Use>
  PO_FN void for_each_float_vector(const uint8_t* row, const Use& use) {
    for_each_vector([&](int v, int64_t offset) {
      constexpr int kFloatBytes = kBytes < 16 ? kCount * 4 : 16;
      const uint8_t* place = row + offset / static_cast<int64_t>(sizeof(Storage)) * 4;
      PO_UNROLL
      for (int part = 0; part < kCount * 4 / kFloatBytes; ++part) {
        use(&values_[v][part * kFloatBytes / 4], load_shared_vector<kFloatBytes>(place + part * kFloatBytes));
      }
    });
  }

  PO_FN void set(int v, const Vector<kBytes>& vector) {
    Storage x[kCount];
    __builtin_memcpy(x, &vector, kBytes);
    PO_UNROLL
    for (int i = 0; i < kCount; ++i) values_[v][i] = Scalar::to_float(x[i]);
  }

  PO_FN void set_split(int v, const Vector<kBytes>& high_vector, const Vector<kBytes>& low_vector) {
    uint16_t high[kBytes / 2];
    uint16_t low[kBytes / 2];
    __builtin_memcpy(high, &high_vector, kBytes);
    __builtin_memcpy(low, &low_vector, kBytes);
    PO_UNROLL
    for (int i = 0; i < kCount; ++i) values_[v][i] = bits_float(static_cast<uint32_t>(high[i]) << 16 | low[i]);
  }

  int64_t first_;
  int64_t row_bytes_;
  float values_[kVectors][kCount] = {};
};

}  // namespace po
