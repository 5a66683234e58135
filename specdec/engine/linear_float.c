// Products of float32.

#include "linear.h"

#ifdef HAS_VERSIONS
#pragma GCC push_options
#pragma GCC target("arch=x86-64-v4,prefer-vector-width=512")
#define LANES 16
#define IS_BF16 0
#define IS_HALVED 0
#define MAX_ROWS 14  // whose sums the registers hold
#define NAME(x) specdec_##x##_16
#include "linear_lanes.h"
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("arch=x86-64-v3")
#define LANES 8
#define IS_BF16 0
#define IS_HALVED 0
#define MAX_ROWS 6
#define NAME(x) specdec_##x##_8
#include "linear_lanes.h"
#pragma GCC pop_options
#endif
