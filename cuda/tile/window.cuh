// A window over a sequence that is read once, in order, by a group of lanes: one coalesced load per kSize elements, the
// next one always in flight, each element handed to all lanes by a shuffle. `load(i)` gives element i and may convert
// it; it runs once per element, not once per lane. On the host it is called for each element itself.
#pragma once

#include "platform/groups.cuh"
#include "platform/memory.cuh"

namespace po {

template <class Element, class Group, class Load>
class LaneWindow {
 public:
  PO_FN LaneWindow(int32_t length, Load load) : load_(load), length_(length) {
#if PO_ON_DEVICE
    current_ = load_lane(0);
    next_ = load_lane(Group::kSize);
#endif
  }

  // Element i < length; i never falls, and all lanes of the group ask for the same one.
  PO_FN Element at(int32_t i) {
#if PO_ON_DEVICE
    if (i - base_ >= Group::kSize) {
      base_ += Group::kSize;
      current_ = next_;
      next_ = load_lane(base_ + Group::kSize);
    }
    return Group{}.shuffle(current_, i - base_);
#else
    return load_(i);
#endif
  }

 private:
#if PO_ON_DEVICE
  PO_FN Element load_lane(int32_t first) const {
    const int32_t i = first + Group{}.rank();
    return i < length_ ? load_(i) : Element{};
  }

  Element current_;
  Element next_;
  int32_t base_ = 0;
#endif
  Load load_;
  [[maybe_unused]] int32_t length_;
};

template <class Group, class Load>
PO_FN auto make_window(int32_t length, Load load) {
  return LaneWindow<decltype(load(0)), Group, Load>(length, load);
}

}  // namespace po
