// Chunks of a row of elements (16 bytes unless stated otherwise), loaded and stored by one thread: as a whole if rows
// are aligned, otherwise by elements. Data that is used once is the first to leave the caches.
#pragma once

#include "platform/memory.cuh"

namespace po {

namespace detail {

template <int kBytes>
PO_FN Vector<kBytes> load_vector_once(const void* source) {
#if PO_ON_DEVICE
  static_assert(kBytes == 16);
  Vector<16> value;
  uint32_t* w = value.words;
  asm volatile("ld.global.cs.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
               : "l"(source));
  return value;
#else
  return load_shared_vector<kBytes>(source);
#endif
}

template <int kBytes>
PO_FN void store_vector_once(void* target, const Vector<kBytes>& value) {
#if PO_ON_DEVICE
  static_assert(kBytes == 16);
  const uint32_t* w = value.words;
  asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(target), "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3])
               : "memory");
#else
  store_vector<kBytes>(target, value);
#endif
}

}  // namespace detail

// `count`: elements that are left in the row. It is less than a chunk's only if rows are not aligned, or if none are
// left.
template <class Storage, bool kIsAligned, bool kOnce, int kBytes = 16>
PO_FN Vector<kBytes> load_chunk_as(const uint8_t* tensor, int64_t element, int count) {
  constexpr int kElements = kBytes / static_cast<int>(sizeof(Storage));
  const auto* source = reinterpret_cast<const Storage*>(tensor) + element;
  if constexpr (kIsAligned) {
    if (count <= 0) return {};
    if constexpr (kOnce) return detail::load_vector_once<kBytes>(source);
    return load_shared_vector<kBytes>(source);
  } else {
    Storage values[kElements] = {};
    PO_UNROLL
    for (int i = 0; i < kElements; ++i) {
      if (i < count) values[i] = source[i];
    }
    Vector<kBytes> chunk;
    __builtin_memcpy(&chunk, values, sizeof(chunk));
    return chunk;
  }
}

// `kBytes`: of a chunk.
template <class Storage, bool kIsAligned, int kBytes = 16>
PO_FN Vector<kBytes> load_chunk(const uint8_t* tensor, int64_t element, int count) {
  return load_chunk_as<Storage, kIsAligned, false, kBytes>(tensor, element, count);
}

template <class Storage, bool kIsAligned>
PO_FN Vector<16> load_once(const uint8_t* tensor, int64_t element, int count) {
  return load_chunk_as<Storage, kIsAligned, true>(tensor, element, count);
}

template <class Storage, bool kIsAligned, bool kOnce = false, int kBytes>
PO_FN void store_chunk(uint8_t* tensor, int64_t element, int count, const Vector<kBytes>& chunk) {
  constexpr int kElements = kBytes / static_cast<int>(sizeof(Storage));
  auto* target = reinterpret_cast<Storage*>(tensor) + element;
  if constexpr (kIsAligned) {
    if (count <= 0) return;
    if constexpr (kOnce) return detail::store_vector_once<kBytes>(target, chunk);
    store_vector<kBytes>(target, chunk);
  } else {
    Storage values[kElements];
    __builtin_memcpy(values, &chunk, sizeof(chunk));
    PO_UNROLL
    for (int i = 0; i < kElements; ++i) {
      if (i < count) target[i] = values[i];
    }
  }
}

template <class Storage, bool kIsAligned>
PO_FN void store_once(uint8_t* tensor, int64_t element, int count, const Vector<16>& chunk) {
  store_chunk<Storage, kIsAligned, true>(tensor, element, count, chunk);
}

}  // namespace po
