// Division by a Divisor, for tests/ops/test_divisor.py.
#include "sched/divisor.cuh"

extern "C" int quotient(int number, int divisor) { return number / po::divisor_of(divisor); }
extern "C" int remainder_of(int number, int divisor) { return number % po::divisor_of(divisor); }
