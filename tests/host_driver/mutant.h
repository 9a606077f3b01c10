// Included before a driver whose kernels hold several mutations (tests/suites/mutations.py): which of them is in force. 0: none.
#pragma once

#include <cstdlib>

inline const int mutant = std::getenv("MUTANT") == nullptr ? 0 : std::atoi(std::getenv("MUTANT"));
