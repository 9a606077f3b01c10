// How a driver ends. tests/suites/sanitizer.py reads these numbers. ThreadSanitizer is set to end with kRace.
#pragma once

namespace driver {

enum Exit : int {
  kAsExpected = 0,
  kBadOption = 2,
  kWrongOutput = 3,   // an output has a wrong element, or an aborted one is not poisoned
  kTimedOut = 4,      // a launch was given up, as a wait ended without its data: the result of a hang
  kMismatched = 5,    // a launch was given up for a contract that was right
  kWrongReport = 6,   // trouble was not noticed or is reported wrongly, or there was none
  kTookPart = 7,      // a launch after an aborted one took part in something
  kWrongRemains = 8,  // counters or memory beside the outputs are not as a launch should leave them
  kNoThreads = 9,     // the system had no room for the threads of a launch
  kRace = 66,
};

}  // namespace driver
