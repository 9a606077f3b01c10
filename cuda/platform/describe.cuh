// Describes the kernels' structs, constants and geometry to the host. A library that includes this file and then a
// kernel answers Python's queries, so no number is written in both languages. Everywhere else the macros are empty.
//
//   PO_DESCRIBE(Plan, team, rows)     every field, in order; a struct with a missing field does not compile
//   PO_CONSTANT(kTileRows)
//   PO_QUERY(grid, (int64_t rows), expression)     a function of whole numbers
#pragma once

#include "platform/platform.cuh"

#if defined(PO_DESCRIPTION)
#if PO_ON_DEVICE
#error "descriptions are for the host"
#endif
#include <cstddef>
#include <initializer_list>
#include <string>
#include <type_traits>

namespace po::description {

// Lines of words: "struct NAME SIZE", then "field NAME OFFSET KIND"; "constant NAME VALUE"; "query NAME".
inline std::string lines;

// The kind of a field: i, u or f and a number of bytes; or a struct's name. The length of an array precedes its
// element's kind.
template <class T>
std::string kind_of() {
  if constexpr (std::is_array_v<T>) {
    return std::to_string(std::extent_v<T>) + "*" + kind_of<std::remove_extent_t<T>>();
  } else if constexpr (std::is_enum_v<T>) {
    return kind_of<std::underlying_type_t<T>>();
  } else if constexpr (std::is_pointer_v<T>) {
    return "u" + std::to_string(sizeof(T));
  } else if constexpr (std::is_arithmetic_v<T>) {
    return (std::is_floating_point_v<T> ? "f" : std::is_signed_v<T> ? "i" : "u") + std::to_string(sizeof(T));
  } else {
    return name_of_struct(static_cast<const T*>(nullptr));
  }
}

struct Extent {
  size_t offset;
  size_t bytes;
  size_t alignment;
};

// Whether the fields leave no room for another one, except for alignment.
constexpr bool are_all(size_t bytes, size_t alignment, std::initializer_list<Extent> fields) {
  const auto aligned = [](size_t place, size_t to) { return (place + to - 1) / to * to; };
  size_t end = 0;
  for (const Extent& field : fields) {
    if (field.offset != aligned(end, field.alignment)) return false;
    end = field.offset + field.bytes;
  }
  return (end == 0 ? alignment : aligned(end, alignment)) == bytes;
}

inline bool add(std::initializer_list<std::string> words) {
  for (const std::string& word : words) lines += word + (&word + 1 == words.end() ? "\n" : " ");
  return true;
}

}  // namespace po::description

#define PO_JOINED_(a, b) a##b
#define PO_JOINED(a, b) PO_JOINED_(a, b)
#define PO_UNNAMED [[maybe_unused]] static const bool PO_JOINED(described_, __COUNTER__)

// PO_EACH(use, T, a, b): use(T, a) use(T, b), for up to 85 fields.
#define PO_PARENTHESES ()
#define PO_EXPAND(...) PO_EXPAND3(PO_EXPAND3(PO_EXPAND3(PO_EXPAND3(__VA_ARGS__))))
#define PO_EXPAND3(...) PO_EXPAND2(PO_EXPAND2(PO_EXPAND2(PO_EXPAND2(__VA_ARGS__))))
#define PO_EXPAND2(...) PO_EXPAND1(PO_EXPAND1(PO_EXPAND1(PO_EXPAND1(__VA_ARGS__))))
#define PO_EXPAND1(...) __VA_ARGS__
#define PO_EACH(use, T, ...) __VA_OPT__(PO_EXPAND(PO_EACH_STEP(use, T, __VA_ARGS__)))
#define PO_EACH_STEP(use, T, first, ...) use(T, first) __VA_OPT__(PO_EACH_NEXT PO_PARENTHESES(use, T, __VA_ARGS__))
#define PO_EACH_NEXT() PO_EACH_STEP

#define PO_EXTENT(T, name) {offsetof(T, name), sizeof(T::name), __alignof__(static_cast<T*>(nullptr)->name)},
#define PO_FIELD(T, name)            \
  PO_UNNAMED = po::description::add( \
      {"field", #name, std::to_string(offsetof(T, name)), po::description::kind_of<decltype(T::name)>()});

#define PO_DESCRIBE(T, ...)                                                                            \
  inline std::string name_of_struct(const T*) { return #T; }                                           \
  static_assert(po::description::are_all(sizeof(T), alignof(T), {PO_EACH(PO_EXTENT, T, __VA_ARGS__)}), \
                #T ": name every field, in order");                                                    \
  PO_UNNAMED = po::description::add({"struct", #T, std::to_string(sizeof(T))});                        \
  PO_EACH(PO_FIELD, T, __VA_ARGS__)
#define PO_CONSTANT(name) \
  PO_UNNAMED = po::description::add({"constant", #name, std::to_string(static_cast<int64_t>(name))});
#define PO_QUERY(name, parameters, ...)                                                  \
  PO_UNNAMED = po::description::add({"query", #name});                                   \
  extern "C" __attribute__((visibility("default"))) int64_t po_query_##name parameters { \
    return static_cast<int64_t>(__VA_ARGS__);                                            \
  }

extern "C" __attribute__((visibility("default"), used)) inline const char* po_description() {
  return po::description::lines.c_str();
}

#else

#define PO_DESCRIBE(T, ...)
#define PO_CONSTANT(name)
#define PO_QUERY(name, parameters, ...)

#endif
