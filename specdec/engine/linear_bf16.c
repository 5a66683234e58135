// Products of bfloat16, two inputs a step.

#include "linear.h"

#ifdef HAS_VERSIONS
#pragma GCC push_options
#pragma GCC target("arch=x86-64-v4,avx512bf16,prefer-vector-width=512")
#define LANES 16
#define IS_BF16 1
#define IS_HALVED 0
#define MAX_ROWS 14  // whose sums the registers hold
#define NAME(x) specdec_##x##_bf16
#include "linear_lanes.h"
#pragma GCC pop_options
#endif
