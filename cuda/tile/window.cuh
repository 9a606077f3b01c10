// A window over a sequence that a group of lanes reads once, in order: one coalesced load per kSize elements, the next
// load always in flight, each element handed to all lanes by a shuffle. `load(i)` gives element i and may convert it;
// it runs once per element, not once per lane. Beyond the end all elements are `fill`. On the host `load` is called for
// each element when it is read.
#pragma once

#include "platform/groups.cuh"
#include "platform/memory.cuh"

namespace po {

template <class Element, class Group, class Load>
class LaneWindow {
 public:
  PO_FN LaneWindow(int32_t length, Element fill, Load load) : load_(load), fill_(fill), length_(length) {
#if PO_ON_DEVICE
    current_ = load_lane(0);
    next_ = load_lane(Group::kSize);
#endif
  }

  // Moves on so that at(i) is within the window. i never falls, and passes no more than one window at a time.
  PO_FN void advance_to([[maybe_unused]] int32_t i) {
#if PO_ON_DEVICE
    if (i - base_ < Group::kSize) return;
    base_ += Group::kSize;
    current_ = next_;
    next_ = load_lane(base_ + Group::kSize);
#endif
  }

  // Element i of the window to which advance_to moved; all lanes of the group pass the same i.
  PO_FN Element at(int32_t i) {
#if PO_ON_DEVICE
    return Group{}.shuffle(current_, i - base_);
#else
    return i < length_ ? load_(i) : fill_;
#endif
  }

 private:
#if PO_ON_DEVICE
  PO_FN Element load_lane(int32_t first) {
    const int32_t i = first + Group{}.rank();
    return i < length_ ? load_(i) : fill_;
  }

  Element current_;
  Element next_;
  int32_t base_ = 0;
#endif
  Load load_;
  Element fill_;
  int32_t length_;
};

template <class Group, class Element, class Load>
PO_FN auto make_window(int32_t length, Element fill, Load load) {
  return LaneWindow<Element, Group, Load>(length, fill, load);
}

// A sequence of at most kSize elements, read at once: lane i holds element i.
template <class Element, class Group, class Load>
class LaneArray {
 public:
  PO_FN LaneArray(int32_t length, Load load) : load_(load) {
#if PO_ON_DEVICE
    held_ = Group{}.rank() < length ? load_(Group{}.rank()) : Element{};
#else
    (void)length;
#endif
  }

  // Element i < length; all lanes of the group pass the same i.
  PO_FN Element at(int32_t i) const {
#if PO_ON_DEVICE
    return Group{}.shuffle(held_, i);
#else
    return load_(i);
#endif
  }

 private:
#if PO_ON_DEVICE
  Element held_;
#endif
  Load load_;
};

template <class Group, class Load>
PO_FN auto make_lane_array(int32_t length, Load load) {
  return LaneArray<decltype(load(0)), Group, Load>(length, load);
}

}  // namespace po
